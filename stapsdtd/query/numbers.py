"""Arithmetic of the expression language on columns of numbers: 64 bits wide, and wrapping around.

A column of uint64 has unsigned numbers of 64 bits. Narrower unsigned numbers are signed here, which holds them all. As
in C, the result is unsigned if either operand is, and that of & | ^ and of swapped bytes always is. Numbers are
compared by their values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from stapsdtd.events.columns import F64, I64, U64, Bools, Numbers
from stapsdtd.query.expression import UNSIGNED, Arithmetic, Operator

_COMPARE = {
    Operator.EQ: np.equal, Operator.NE: np.not_equal, Operator.LT: np.less,
    Operator.LE: np.less_equal, Operator.GT: np.greater, Operator.GE: np.greater_equal,
}  # fmt: skip
_SHIFT_BITS = 63
_SIGN, _ALL_BITS = 1 << 63, (1 << 64) - 1
_SHIFTS = frozenset({Arithmetic.LEFT, Arithmetic.RIGHT})

Number = int | float
_OF_INTEGERS: dict[Arithmetic, Callable[[int, int], int]] = {
    Arithmetic.ADD: operator.add, Arithmetic.SUBTRACT: operator.sub, Arithmetic.MULTIPLY: operator.mul,
    Arithmetic.LEFT: operator.lshift, Arithmetic.RIGHT: operator.rshift,
    Arithmetic.AND: operator.and_, Arithmetic.OR: operator.or_, Arithmetic.XOR: operator.xor,
    Arithmetic.SWAP: lambda left, right: int.from_bytes(left.to_bytes(8, "little"), "big") >> right,
}  # fmt: skip
_OF_FLOATS: dict[Arithmetic, Callable[[float, float], float]] = {
    Arithmetic.ADD: operator.add, Arithmetic.SUBTRACT: operator.sub,
    Arithmetic.MULTIPLY: operator.mul, Arithmetic.DIVIDE: operator.truediv,
}  # fmt: skip
_PLAIN: dict[Arithmetic, np.ufunc] = {
    Arithmetic.ADD: np.add, Arithmetic.SUBTRACT: np.subtract, Arithmetic.MULTIPLY: np.multiply,
    Arithmetic.AND: np.bitwise_and, Arithmetic.OR: np.bitwise_or, Arithmetic.XOR: np.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Truth:
    """Whether a condition holds for each event. unavailable is None if that is known of every event."""

    data: Bools
    unavailable: Bools | None = None

    @property
    def known(self) -> Bools:
        """For which events the condition is known to hold."""
        return self.data if self.unavailable is None else self.data & ~self.unavailable


def literal(value: Number, count: int) -> Numbers:
    """Return a column of one number, which as an integer has 64 bits."""
    if isinstance(value, float):
        return Numbers(np.full(count, value, np.float64))
    if value < 1 << 63:
        return Numbers(np.full(count, value, np.int64))
    return Numbers(np.full(count, value, np.uint64))


def folded(how: Arithmetic, left: Number, right: Number) -> Number:
    """Calculate with constants, as `calculate` does with columns of one number. right: not 0 if it divides."""
    if isinstance(left, float) or isinstance(right, float):
        return _OF_FLOATS[how](float(left), float(right))
    is_unsigned = how in UNSIGNED or left >= _SIGN or (right >= _SIGN and how not in _SHIFTS)
    if is_unsigned:
        left &= _ALL_BITS
        right &= _ALL_BITS
    if how in _SHIFTS or how is Arithmetic.SWAP:
        result = _OF_INTEGERS[how](left, right & _SHIFT_BITS)
    elif how in {Arithmetic.DIVIDE, Arithmetic.REMAINDER}:
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        result = quotient if how is Arithmetic.DIVIDE else left - quotient * right
    else:
        result = _OF_INTEGERS[how](left, right)
    result &= _ALL_BITS
    return result if is_unsigned or result < _SIGN else result - _ALL_BITS - 1


def calculate(how: Arithmetic, left: Numbers, right: Numbers) -> Numbers:
    """Return the results, unavailable where an operand is, and after a division by 0."""
    unavailable = either(left.unavailable, right.unavailable)
    with np.errstate(all="ignore"):
        if how in {Arithmetic.LEFT, Arithmetic.RIGHT}:
            return Numbers(_shift(how, left.data, right.data), unavailable)
        one, other = unsigned(left.data, right.data) if how in UNSIGNED else alike(left.data, right.data)
        if how is Arithmetic.SWAP:
            return Numbers(_shift(Arithmetic.RIGHT, one.byteswap(), other), unavailable)
        if how in _PLAIN:
            return Numbers(_PLAIN[how](one, other), unavailable)
        by_zero = other == 0
        result = _quotient(how, one, np.where(by_zero, other.dtype.type(1), other))
    return Numbers(result, either(unavailable, by_zero if by_zero.any() else None))


def compare(how: Operator, left: Numbers, right: Numbers) -> Truth:
    """Compare by value: a signed number below 0 is less than any unsigned one."""
    one, other = left.data, right.data
    unavailable = either(left.unavailable, right.unavailable)
    if {one.dtype.kind, other.dtype.kind} != {"i", "u"}:
        return Truth(_COMPARE[how](one, other), unavailable)
    is_negative = one < 0 if one.dtype.kind == "i" else other < 0
    less = how in {Operator.LT, Operator.LE} if one.dtype.kind == "i" else how in {Operator.GT, Operator.GE}
    return Truth(np.where(is_negative, less or how is Operator.NE, _COMPARE[how](*unsigned(one, other))), unavailable)


def choose(which: Bools, then: Numbers, otherwise: Numbers) -> Numbers:
    """Return the number of one column or of the other."""
    one, other = alike(then.data, otherwise.data)
    return Numbers(np.where(which, one, other), chosen(which, then.unavailable, otherwise.unavailable))


def chosen(which: Bools, then: Bools | None, otherwise: Bools | None) -> Bools | None:
    """Return which values of the chosen column are unavailable."""
    if then is None and otherwise is None:
        return None
    none = np.zeros(len(which), np.bool_)
    return np.where(which, none if then is None else then, none if otherwise is None else otherwise)


def either(one: Bools | None, other: Bools | None) -> Bools | None:
    return other if one is None else one if other is None else one | other


def unsigned(*data: I64 | U64 | F64) -> tuple[U64, ...]:
    return tuple(each.view(np.uint64) for each in data)


def alike(one: I64 | U64 | F64, other: I64 | U64 | F64) -> tuple[I64 | U64 | F64, I64 | U64 | F64]:
    """Return both as what they are calculated as: floating-point, unsigned or signed."""
    if one.dtype == other.dtype:
        return one, other
    if "f" in {one.dtype.kind, other.dtype.kind}:
        return one.astype(np.float64), other.astype(np.float64)
    return one.view(np.uint64), other.view(np.uint64)


def _shift(how: Arithmetic, data: I64 | U64 | F64, by: I64 | U64 | F64) -> I64 | U64 | F64:
    """By a count modulo 64. The sign is kept."""
    counts = (by.view(np.uint64) & np.uint64(_SHIFT_BITS)).view(data.dtype)
    shift: np.ufunc = np.left_shift if how is Arithmetic.LEFT else np.right_shift
    return cast("I64 | U64", shift(data, counts))


def _quotient(how: Arithmetic, data: I64 | U64 | F64, by: I64 | U64 | F64) -> I64 | U64 | F64:
    """Divide, toward 0, or return the remainder, which has the dividend's sign. by: not 0."""
    if data.dtype.kind == "f":
        return data / by
    # the processor would trap on the least number divided by -1
    is_minus_one = by == -1 if data.dtype.kind == "i" else np.zeros(len(by), np.bool_)
    divisor = np.where(is_minus_one, by.dtype.type(1), by)
    remainder = np.fmod(data, divisor)
    if how is Arithmetic.REMAINDER:
        return cast("I64 | U64", remainder)
    quotient = (data - remainder) // divisor
    return np.where(is_minus_one, -quotient, quotient)
