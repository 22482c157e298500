"""The values that D programs print: integers of 8 to 64 bits, strings, addresses, and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stapsdtd.runtime.text import escape

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1

_NAMES = {8: "char", 16: "short", 32: "int", 64: "long long"}


@dataclass(frozen=True, slots=True)
class Integer:
    """bits: 8, 16, 32 or 64."""

    bits: int
    is_signed: bool

    def __str__(self) -> str:
        return _NAMES[self.bits] if self.is_signed else f"unsigned {_NAMES[self.bits]}"


@dataclass(frozen=True, slots=True)
class String:
    def __str__(self) -> str:
        return "string"


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address, of 64 bits without a sign. target: what is there; None of `void *`."""

    target: Type | None = None

    def __str__(self) -> str:
        return f"{'void' if self.target is None else self.target} *"


@dataclass(frozen=True, slots=True)
class Bytes:
    """A pointer to what copyin() copied, whose value is the bytes themselves. target: as of Pointer."""

    target: Type | None = None

    def __str__(self) -> str:
        return f"{'void' if self.target is None else self.target} *"


Type = Integer | String | Pointer | Bytes
Value = int | str | bytes


class OwnText(str):
    """A string that the D program itself contains, printed as it is. What is made of one is an ordinary string."""

    __slots__ = ()


def shown(text: str) -> str:
    """Return a string as it is printed: what traced programs, files and the server chose is escaped."""
    return text if isinstance(text, OwnText) else escape(text)


INT64: Final = Integer(64, is_signed=True)
UINT64: Final = Integer(64, is_signed=False)


STRING_BYTES: Final = 256
"""With the NUL, unless the option strsize says otherwise."""


def size_of(kind: Type, string_bytes: int = STRING_BYTES) -> int:
    """Return the bytes that a value has in memory. string_bytes: those of strings."""
    match kind:
        case Integer(bits):
            return bits // 8
        case String():
            return string_bytes
        case Pointer() | Bytes():
            return 8


def signed(value: int, bits: int = 64) -> int:
    """Return the value that the lowest bits have in two's complement."""
    sign = 1 << (bits - 1)
    return ((value + sign) & ((1 << bits) - 1)) - sign


def unsigned(value: int, bits: int = 64) -> int:
    return value & ((1 << bits) - 1)


def quotient(value: int, divisor: int) -> int:
    """Return the quotient as D has it: rounded toward zero. Python's own rounds down."""
    magnitude = abs(value) // abs(divisor)
    return magnitude if (value < 0) == (divisor < 0) else -magnitude
