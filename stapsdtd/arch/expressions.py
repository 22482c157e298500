"""Parse the expressions common to all assemblers: sums of numbers and at most one symbol.

    -8   0x10   010   8+4-2   counter   table+24   52+table-4   .LC0   hidden@GOTOFF+4

A leading zero makes a number octal, as in gas.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stapsdtd.model import Address, Constant, Memory, Operand, Unavailable

RELOCATED = Unavailable("the linker's result for this relocation is unknown")

GOTOFF = "@GOTOFF"
"""Suffix of a symbol for its distance from the global offset table, on i386."""

_IN_THE_GOT = Unavailable("the address of the global offset table is unknown")
TOO_FAR = Unavailable("the displacement does not fit in 32 bits")

_SUM = re.compile(r"[+-]?[\w.$@]++(?:[+-][\w.$@]++)*+")
_TERM = re.compile(r"([+-]?)([\w.$@]++)")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20}")
_SYMBOL = re.compile(r"([A-Za-z_][\w.$]*+|\.[\w.$]++)((?:@[\w.$@]*+)?)")
_FLOAT = re.compile(r"[+-]?[0-9]+\.[0-9]*(?:e[+-]?[0-9]+)?")


class Expression(NamedTuple):
    offset: int
    symbol: str | None


def parse_expression(text: str) -> Expression | Unavailable | None:
    """Return Unavailable if only the linker knows the value, None if text is not an expression."""
    if not _SUM.fullmatch(text):
        return None
    offset = 0
    symbols: list[tuple[str, str, str]] = []
    for sign, term in _TERM.findall(text):
        if _NUMBER.fullmatch(term):
            offset += -number_of(term) if sign == "-" else number_of(term)
        elif symbol := _SYMBOL.fullmatch(term):
            symbols.append((sign, symbol[1], symbol[2]))
        else:
            return None
    if not symbols:
        return Expression(offset, None)
    sign, name, relocation = symbols[0]
    if relocation.startswith("@GOT"):
        return _IN_THE_GOT
    if len(symbols) > 1 or sign == "-" or relocation:
        return RELOCATED
    if name.startswith(".L"):
        return Unavailable(f"{name} is a local label, which is in no symbol table")
    return Expression(offset, name)


def parse_value(text: str) -> Operand | None:
    """Parse an immediate operand, a number or the address of a symbol; None if text is neither."""
    match parse_expression(text):
        case Expression(offset, None):
            return Constant(offset)
        case Expression(offset, symbol):
            return Address(None, offset, symbol) if fits(offset) else TOO_FAR
        case None if _FLOAT.fullmatch(text):
            return Unavailable("floating-point constants are not supported")
        case unavailable:
            return unavailable


def parse_memory(
    displacement: str, base: str | None, index: str | None = None, scale: int = 1, *, word_bytes: int = 8
) -> Memory | Unavailable | None:
    """Return memory at registers and a displacement, which may be empty; None if that is not an expression.

    Displacements wrap around as addresses do. No processor has displacements of more than 32 bits.
    """
    match parse_expression(displacement or "0"):
        case Expression(offset, symbol):
            bits = 8 * word_bytes
            offset &= (1 << bits) - 1
            offset -= offset >> (bits - 1) << bits
            return Memory(base, offset, index, scale, symbol) if fits(offset) else TOO_FAR
        case other:
            return other


def not_an_operand(text: str, architecture: str) -> Unavailable:
    return Unavailable(f"not an operand of {architecture}" if text else "the operand is missing")


def not_saved(register: str) -> Unavailable:
    return Unavailable(f"{register} is not among the registers saved at a probe")


def fits(displacement: int) -> bool:
    """Report whether a displacement fits in an instruction's 32 bits."""
    return -(1 << 31) <= displacement < 1 << 31


def number_of(digits: str) -> int:
    """Parse a number as gas does, for which a leading zero means octal."""
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    is_octal = digits.startswith("0") and not set(digits) & {"8", "9"}
    return int(digits, 8 if is_octal else 10)
