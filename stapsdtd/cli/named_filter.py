"""Names of arguments in --where: `timeout > 0` becomes `arg4 > 0`.

A name means the same argument of all selected probes, since there is one filter for them. What the language of filters
calls by that name comes first.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.signatures import Signature

_TOKEN = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[0-9]\w*)|([A-Za-z_]\w*)(?!\w*\s*\()""", re.DOTALL)
"""A string or a number, or a name, which is not that of a function."""
RESERVED = frozenset(
    [
        "pid",
        "tid",
        "uid",
        "gid",
        "execname",
        "comm",
        "cgroup",
        "container",
        "cpu",
        "timestamp",
        "provider",
        "module",
        "function",
        "name",
        "elapsed",
    ]
)


def by_position(where: str, signatures: Sequence[Sequence[Signature]]) -> str:
    """Replace names of arguments. signatures: those that each selector's probe may have, none if it has no names."""
    columns = {
        name: {_index(signature, name) for each in signatures for signature in each} | _unknown(signatures)
        for _, name in _TOKEN.findall(where)
        if name and name not in RESERVED
    }

    def replaced(match: re.Match[str]) -> str:
        indexes = columns.get(match[2], {None})
        if indexes == {None}:
            return match[0]
        if len(indexes) > 1:
            raise click.UsageError(
                f"--where: {match[2]} is not the same argument of all selected probes; trace them apart, or write arg0"
            )
        return f"arg{indexes.pop()}"

    return _TOKEN.sub(replaced, where)


def _index(signature: Signature, name: str) -> int | None:
    arguments = signature.arguments or ()
    return next((index for index, declared in enumerate(arguments) if declared.name == name), None)


def _unknown(signatures: Sequence[Sequence[Signature]]) -> set[int | None]:
    return {None} if not all(signatures) else set()
