"""Values as types have them: integers of so many bits, and strings of a bounded length."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from stapsdtd.query.d import texts
from stapsdtd.query.d.values import Integer as IntegerType
from stapsdtd.query.d.values import Pointer, Type, Value, signed, unsigned
from stapsdtd.query.d.values import String as StringType


def converter(kind: Type) -> Callable[[Value], Value]:
    """Return a function that returns a value as its type has it."""
    match kind:
        case IntegerType(bits, is_signed):
            return cast("Callable[[Value], Value]", _wrapping(bits, is_signed=is_signed))
        case Pointer():
            return cast("Callable[[Value], Value]", _wrapping(64, is_signed=False))
        case StringType():
            return cast("Callable[[Value], Value]", texts.cut)
        case _:
            return lambda value: value


def _wrapping(bits: int, *, is_signed: bool) -> Callable[[int], int]:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    wrap = signed if is_signed else unsigned
    return lambda value: value if low <= value <= high else wrap(value, bits)
