"""Comparisons that are decided by what an argument's size and sign allow: a uint32 is never negative."""

from __future__ import annotations

import operator
from collections.abc import Callable

from stapsdtd.model import Argument, Constant
from stapsdtd.query.expression import ArgumentValue, Comparison, Operator

ALL_BITS = (1 << 64) - 1
_FIELD_BITS = (1 << 32) - 1
_COMPARE: dict[Operator, Callable[[int, int], bool]] = {
    Operator.EQ: operator.eq, Operator.NE: operator.ne, Operator.LT: operator.lt,
    Operator.LE: operator.le, Operator.GT: operator.gt, Operator.GE: operator.ge,
}  # fmt: skip


def outcome(comparison: Comparison, arguments: tuple[Argument, ...]) -> bool | None:
    """Return what a comparison is at all hits of a site with these arguments; None if it has to be tested."""
    match comparison.subject, comparison.value:
        case ArgumentValue(index), int(value):
            return _outcome(comparison, value, *_range(arguments[index], comparison.mask))
        case _, int(value):
            mask = ALL_BITS if comparison.mask is None else comparison.mask
            return _outcome(comparison, value, 0, _FIELD_BITS & mask)
        case _:
            return None


def _range(argument: Argument, mask: int | None) -> tuple[int, int]:
    """Return the least and greatest values possible once the mask is applied."""
    bits = 8 * argument.size
    if isinstance(argument.operand, Constant):
        value = argument.operand.value % (1 << bits)
        if argument.signed and value >> (bits - 1):
            value -= 1 << bits
        value = value if mask is None else value & mask
        return value, value
    if mask is not None:
        # a negative number is sign-extended
        return 0, mask if argument.signed else mask & ((1 << bits) - 1)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if argument.signed else (0, (1 << bits) - 1)


def _outcome(comparison: Comparison, value: int, low: int, high: int) -> bool | None:
    """Return the comparison's result if it is the same for all numbers from low to high, else None."""
    if low == high:
        return _COMPARE[comparison.operator](low, value)
    match comparison.operator:
        case Operator.EQ | Operator.NE:
            impossible = not low <= value <= high or (comparison.mask is not None and bool(value & ~high))
            return comparison.operator is Operator.NE if impossible else None
        case _:
            # an ordering that holds, or fails, for both ends does so for all numbers between
            outcomes = {_COMPARE[comparison.operator](number, value) for number in (low, high)}
            return outcomes.pop() if len(outcomes) == 1 else None
