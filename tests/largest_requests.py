"""The largest requests that are accepted, by what they consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stapsdtd.config.request_limits import (
    MAX_CAPTURES,
    MAX_CHARACTERS,
    MAX_CLAUSES,
    MAX_FIELDS,
    MAX_KEYS,
    MAX_PARTS,
    MAX_PIDS,
    MAX_SCOPE_VALUES,
    MAX_TAG_BYTES,
)
from stapsdtd.v1 import stapsdt_pb2 as pb

SELECTOR = "app:call"
SELECTORS = 256
_TESTS = 64
"""As many comparisons as an expression may have."""


def of_clauses(fields: Iterable[list[str]], where: str = "") -> pb.SubscribeRequest:
    """Return a request with a clause for each of these lists."""
    return pb.SubscribeRequest(
        clauses=[
            pb.Clause(tag=str(number), selectors=[SELECTOR], where=where, fields=texts)
            for number, texts in enumerate(fields)
        ]
    )


def sums(parts: int = MAX_PARTS) -> pb.SubscribeRequest:
    """Return one whose expressions have so many parts, in texts that differ."""
    texts, number = [], 0
    while parts:
        # a name, 60 operators, 60 names and the end
        operators = min(parts - 2, 120) // 2
        texts.append(f"arg{number}" + "+arg1" * operators)
        parts -= 2 * operators + 2
        number += 1
    return of_clauses([text] for text in texts)


def computed_fields() -> pb.SubscribeRequest:
    """Return one with as many different expressions as fit: a name, an operator, a number and the end."""
    texts = [f"arg{number % 100}+{number}" for number in range(MAX_PARTS // 4)]
    return of_clauses(texts[first : first + MAX_FIELDS] for first in range(0, len(texts), MAX_FIELDS))


def repeated() -> pb.SubscribeRequest:
    """Return one that has the longest filter and the longest expression in all clauses."""
    longest = "arg0" + "+arg1" * 50
    where = "||".join(f"arg0=={number}" for number in range(_TESTS))
    fields = [longest, *(f"arg{number}" for number in range(1, MAX_FIELDS))]
    return of_clauses([fields] * MAX_CLAUSES, where)


def nested() -> pb.SubscribeRequest:
    """Return one of the deepest conditions."""
    depth = 30
    texts = ["(" * depth + f"arg{number}" + "?arg1:1)" * depth for number in range(MAX_PARTS // (6 * depth + 2))]
    return of_clauses([text] for text in texts)


def folded() -> pb.SubscribeRequest:
    return of_clauses([["+".join(["1"] * (MAX_PARTS // 2))]])


def escapes() -> pb.SubscribeRequest:
    """Return one whose strings are nothing but escape sequences."""
    return of_clauses([[f"'{number:02}" + r"\"" * 2000 + "'"] for number in range(MAX_CHARACTERS // 4004)])


def captures() -> pb.SubscribeRequest:
    return pb.SubscribeRequest(
        selectors=[f"a{number}(" + ",".join(["arg0"] * 128) + ")" for number in range(MAX_CAPTURES // 128)]
    )


def selectors() -> pb.SubscribeRequest:
    return pb.SubscribeRequest(selectors=_globs(MAX_CHARACTERS // SELECTORS))


def _globs(length: int) -> list[str]:
    return [f"*{number}*:".ljust(length, "[") for number in range(SELECTORS)]


def spans() -> pb.SubscribeRequest:
    key = [f"arg{number}" for number in range(MAX_KEYS)]
    span = pb.Span(start_selectors=[SELECTOR], start_where="arg0 > 5", key=key)
    where = "&&".join(f"elapsed>{number}" for number in range(_TESTS))
    return pb.SubscribeRequest(
        clauses=[
            pb.Clause(tag=str(number).rjust(MAX_TAG_BYTES), selectors=[SELECTOR], where=where, span=span)
            for number in range(MAX_CLAUSES)
        ]
    )


def scope() -> pb.SubscribeRequest:
    pids = range(1 << 20, (1 << 20) + MAX_PIDS)
    wide = pb.Scope(pids=pids, exclude_pids=pids, uids=[0] * MAX_SCOPE_VALUES, execnames=["x" * 15] * MAX_SCOPE_VALUES)
    return pb.SubscribeRequest(selectors=[SELECTOR], scope=wide)


def everything() -> pb.SubscribeRequest:
    """Return one of all kinds, each as large as the others leave room for."""
    request = computed_fields()
    request.scope.CopyFrom(scope().scope)
    del request.clauses[0].selectors[:]
    lists = captures().selectors
    request.clauses[0].selectors.extend([*lists, *_globs(24)[: SELECTORS - len(request.clauses) + 1 - len(lists)]])
    return request


LARGEST: dict[str, Callable[[], pb.SubscribeRequest]] = {
    "sums": sums,
    "computed fields": computed_fields,
    "the same in all clauses": repeated,
    "nested conditions": nested,
    "constants": folded,
    "escape sequences": escapes,
    "capture lists": captures,
    "selectors": selectors,
    "spans": spans,
    "scope": scope,
    "everything": everything,
}
