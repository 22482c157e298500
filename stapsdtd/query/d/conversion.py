"""Values as types have them: integers of so many bits, and strings of a bounded length."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from stapsdtd.query.d.values import STRING_BYTES, Pointer, Type, Value, signed, unsigned
from stapsdtd.query.d.values import Integer as IntegerType
from stapsdtd.query.d.values import String as StringType


def converter(kind: Type, string_bytes: int = STRING_BYTES) -> Callable[[Value], Value]:
    """Return a function that returns a value as its type has it. string_bytes: of strings, with the NUL."""
    match kind:
        case IntegerType(bits, is_signed):
            return cast("Callable[[Value], Value]", _wrapping(bits, is_signed=is_signed))
        case Pointer():
            return cast("Callable[[Value], Value]", _wrapping(64, is_signed=False))
        case StringType():
            return cast("Callable[[Value], Value]", _cutting(string_bytes - 1))
        case _:
            return lambda value: value


def _cutting(length: int) -> Callable[[str], str]:
    return lambda text: text if len(text) <= length else text[:length]


def _wrapping(bits: int, *, is_signed: bool) -> Callable[[int], int]:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    wrap = signed if is_signed else unsigned
    return lambda value: value if low <= value <= high else wrap(value, bits)
