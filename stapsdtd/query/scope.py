"""Combine a client's scope and its expression into one predicate."""

from __future__ import annotations

from collections.abc import Sequence

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.query.compile import MAX_TESTS, comparisons
from stapsdtd.query.expression import And, Cgroup, Comparison, Condition, Field, Operator, Or


def combined(
    where: Condition | None,
    uids: Sequence[int],
    execnames: Sequence[bytes],
    cgroups: Sequence[Cgroup],
    containers: Sequence[Cgroup] = (),
) -> Condition | None:
    """Require one value of each kind that is not empty, and the expression. Return None if there is nothing to require.

    Raises InvalidArgumentError if that takes more comparisons than are possible.
    """
    kinds: list[tuple[Field, Sequence[int | bytes | Cgroup]]] = [
        (Field.UID, uids), (Field.CGROUP, cgroups), (Field.CGROUP, containers), (Field.EXECNAME, execnames),
    ]  # fmt: skip
    parts = [_any_of(field, values) for field, values in kinds if values]
    if where is not None:
        parts.append(where)
    if not parts:
        return None
    whole = parts[0] if len(parts) == 1 else And(tuple(parts))
    count = sum(1 for _ in comparisons(whole))
    if count > MAX_TESTS:
        raise InvalidArgumentError(
            "scope",
            f"uids, execnames, cgroups, containers and where take {count} comparisons; the limit is {MAX_TESTS}",
        )
    return whole


def _any_of(field: Field, values: Sequence[int | bytes | Cgroup]) -> Condition:
    distinct = tuple(Comparison(field, Operator.EQ, value) for value in dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else Or(distinct)
