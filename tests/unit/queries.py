"""Random expressions, their text, and what they mean, told a second time and the simple way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from stapsdtd.model import Argument, Constant, Site
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Condition, Field, Not, Operator, Or

_COMPARE: dict[Operator, Callable[[Any, Any], bool]] = {
    Operator.EQ: operator.eq, Operator.NE: operator.ne, Operator.LT: operator.lt,
    Operator.LE: operator.le, Operator.GT: operator.gt, Operator.GE: operator.ge,
}  # fmt: skip
_EDGES = [
    edge + near for bits in (7, 8, 15, 16, 31, 32, 63) for edge in (1 << bits, -(1 << bits)) for near in (-1, 0, 1)
]
NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([edge for edge in _EDGES if edge >= -(1 << 63)]),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
_COMMS = st.binary(max_size=15).filter(lambda name: 0 not in name)
_MASKS = (
    st.none()
    | st.sampled_from([0, 1, 0xFF, 0xF0, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
    | st.integers(0, (1 << 64) - 1)
)


def comparisons(arguments: int, *, comms: st.SearchStrategy[bytes]) -> st.SearchStrategy[Comparison]:
    subjects = st.builds(ArgumentValue, st.integers(0, arguments - 1)) | st.sampled_from([Field.PID, Field.TID])
    numeric = st.builds(Comparison, subjects, st.sampled_from(Operator), NUMBERS, _MASKS)
    named = st.builds(
        Comparison, st.just(Field.EXECNAME), st.sampled_from([Operator.EQ, Operator.NE]), comms, st.none()
    )
    return numeric | named


def expressions(arguments: int = 4, comms: st.SearchStrategy[bytes] = _COMMS) -> st.SearchStrategy[Condition]:
    """No And directly in an And, no Or in an Or and no Not in a Not: the parser makes none."""
    leaves = comparisons(arguments, comms=comms)

    def grown(inner: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
        several = st.lists(inner, min_size=2, max_size=4)
        return st.one_of(
            inner.map(lambda each: each.operand if isinstance(each, Not) else Not(each)),
            several.map(tuple).map(And),
            several.map(tuple).map(Or),
        )

    return st.recursive(leaves, grown, max_leaves=12)


def text_of(condition: Condition) -> str:
    match condition:
        case Comparison(subject, relation, value, mask):
            name = f"arg{subject.index}" if isinstance(subject, ArgumentValue) else subject.value
            masked = name if mask is None else f"{name} & {mask:#x}"
            return f"{masked} {relation.value} {_constant_text(value)}"
        case Not(operand):
            return f"!({text_of(operand)})"
        case And(operands):
            return " && ".join(f"({text_of(each)})" for each in operands)
        case Or(operands):
            return " || ".join(f"({text_of(each)})" for each in operands)
        case _:
            raise TypeError(condition)


def _constant_text(value: int | bytes | Cgroup) -> str:
    if isinstance(value, bytes):
        return '"' + "".join(f"\\x{byte:02x}" for byte in value) + '"'
    return f'"{value.path}"' if isinstance(value, Cgroup) else str(value)


@dataclass(frozen=True, slots=True)
class Row:
    """One hit. arguments: what is in the register or memory, all of its bits; None where that cannot be read."""

    pid: int
    tid: int
    comm: bytes
    arguments: Mapping[int, int | None]


class UnreadableError(Exception):
    pass


def accepts(expression: Condition, site: Site, row: Row) -> bool:
    try:
        return _holds(expression, site, row)
    except UnreadableError:
        return False


def _holds(expression: Condition, site: Site, row: Row) -> bool:
    match expression:
        case Not(operand):
            return not _holds(operand, site, row)
        case And(operands):
            return all(_holds(each, site, row) for each in operands)
        case Or(operands):
            return any(_holds(each, site, row) for each in operands)
        case Comparison(Field.EXECNAME, relation, value):
            return _COMPARE[relation](row.comm, value)
        case Comparison(subject, relation, value, mask):
            if isinstance(subject, Field):
                found = row.pid if subject is Field.PID else row.tid
            else:
                argument = site.arguments[subject.index]
                raw = row.arguments[subject.index]
                if raw is None:
                    if is_decided(expression, argument):
                        raw = 0
                    else:
                        raise UnreadableError
                found = value_of(argument, raw)
            return _COMPARE[relation](found if mask is None else found & mask, value)
        case _:
            raise TypeError(expression)


def value_of(argument: Argument, raw: int) -> int:
    if isinstance(argument.operand, Constant):
        raw = argument.operand.value
    value = raw % (1 << 8 * argument.size)
    is_negative = argument.signed and value >> (8 * argument.size - 1)
    return value - (1 << 8 * argument.size) if is_negative else value


def is_decided(comparison: Comparison, argument: Argument) -> bool:
    """Whether an argument's size and sign decide a comparison, so that nothing has to be read."""
    assert isinstance(comparison.value, int)
    bits = 8 * argument.size
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if argument.signed else (0, (1 << bits) - 1)
    if isinstance(argument.operand, Constant):
        return True
    if comparison.mask is not None:
        low, high = 0, comparison.mask if argument.signed else comparison.mask & ((1 << bits) - 1)
        if comparison.operator in {Operator.EQ, Operator.NE} and comparison.value & ~high:
            return True
    if low == high:
        return True
    match comparison.operator:
        case Operator.EQ | Operator.NE:
            return not low <= comparison.value <= high
        case Operator.LT | Operator.GE:
            return comparison.value <= low or comparison.value > high
        case Operator.LE | Operator.GT:
            return comparison.value < low or comparison.value >= high
