"""Argument types and declarations of probes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_ARGUMENTS = 6
"""The number that x86-64 passes in registers, and libstapsdt's limit."""


class ArgType(Enum):
    """The type of one argument.

    size: in bytes: 1, 2, 4 or 8. A string is the 8-byte address of its first character.
    signed: whether the value is in two's complement.
    low, high: the smallest and largest integer that fits; 0 and 2**64 - 1 for STRING.

    >>> INT8.low, INT8.high
    (-128, 127)
    """

    INT8 = "int8", 1, True
    UINT8 = "uint8", 1, False
    INT16 = "int16", 2, True
    UINT16 = "uint16", 2, False
    INT32 = "int32", 4, True
    UINT32 = "uint32", 4, False
    INT64 = "int64", 8, True
    UINT64 = "uint64", 8, False
    STRING = "string", 8, False

    def __init__(self, label: str, size: int, signed: bool) -> None:
        self.label = label
        self.size = size
        self.signed = signed
        self.low = -(1 << 8 * size - 1) if signed else 0
        self.high = (1 << 8 * size - signed) - 1


INT8 = ArgType.INT8
UINT8 = ArgType.UINT8
INT16 = ArgType.INT16
UINT16 = ArgType.UINT16
INT32 = ArgType.INT32
UINT32 = ArgType.UINT32
INT64 = ArgType.INT64
UINT64 = ArgType.UINT64
STRING = ArgType.STRING


@dataclass(frozen=True)
class Declaration:
    """A probe's name and the types of its arguments."""

    name: str
    types: tuple[ArgType, ...]


def check_name(name: str) -> None:
    """Raises ValueError unless every tool accepts the name: ASCII letters, digits and _, not starting with a digit."""
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is not a valid probe or provider name: use letters, digits and _ (__ for a dash)")


def argtype(declared: ArgType | type[int | str]) -> ArgType:
    """Return the ArgType: INT64 for `int`, STRING for `str`. Raises TypeError for anything else."""
    if isinstance(declared, ArgType):
        return declared
    if declared is int:
        return INT64
    if declared is str:
        return STRING
    raise TypeError(f"the type of an argument is int, str or an ArgType, not {declared!r}")
