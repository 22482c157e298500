"""bpf/calculate.h told again in Python: what a test or a calculation makes of two words."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from stapsdtd.query.program import Operation, Relation

_ALL_BITS = (1 << 64) - 1
RELATIONS: Mapping[int, Callable[[int, int], bool]] = {
    Relation.EQ: operator.eq, Relation.NE: operator.ne, Relation.LT: operator.lt, Relation.LE: operator.le,
    Relation.GT: operator.gt, Relation.GE: operator.ge, Relation.SIGNED_LT: operator.lt,
    Relation.SIGNED_LE: operator.le, Relation.SIGNED_GT: operator.gt, Relation.SIGNED_GE: operator.ge,
}  # fmt: skip
_PLAIN: Mapping[int, Callable[[int, int], int]] = {
    Operation.ADD: operator.add, Operation.SUBTRACT: operator.sub, Operation.MULTIPLY: operator.mul,
    Operation.AND: operator.and_, Operation.OR: operator.or_, Operation.XOR: operator.xor,
}  # fmt: skip


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def holds(relation: int, left: int, right: int) -> bool:
    if relation >= Relation.SIGNED_LT:
        left, right = signed(left), signed(right)
    return RELATIONS[relation](left, right)


def calculated(operation: int, left: int, right: int) -> int | None:
    """The word, or None after a division by 0."""
    if operation in _PLAIN:
        return _PLAIN[operation](left, right) & _ALL_BITS
    match operation:
        case Operation.LEFT:
            return left << (right & 63) & _ALL_BITS
        case Operation.RIGHT:
            return left >> (right & 63)
        case Operation.SIGNED_RIGHT:
            return signed(left) >> (right & 63) & _ALL_BITS
    if not right:
        return None
    if operation in {Operation.SIGNED_DIVIDE, Operation.SIGNED_REMAINDER}:
        left, right = signed(left), signed(right)
    quotient = abs(left) // abs(right)
    if (left < 0) != (right < 0):
        quotient = -quotient
    divides = operation in {Operation.DIVIDE, Operation.SIGNED_DIVIDE}
    return (quotient if divides else left - quotient * right) & _ALL_BITS
