"""Operands of i386 as gcc -m32 and clang -m32 write them, in AT&T syntax.

    $-9   $counter   %eax   %ah   (%edx)   -8(%ebp)   (%ebx,%eax,4)   counter   pairs(,%eax,4)   table+4(%ecx)

Position-independent code reaches its variables by their distance from the global offset table, whose address is
in a register, `hidden@GOTOFF(%eax)`. Those of a thread, `%gs:mine@ntpoff`, cannot be fetched. A value of 8 bytes in
registers is in two of them, of which the note names one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from stapsdtd.model import Memory, Operand, Register, Unavailable
from stapsdtd.operands.expressions import (
    GOTOFF,
    not_an_operand,
    not_saved,
    parse_expression,
    parse_memory,
    parse_value,
)

_NAME = "i386"
_WORD_BYTES = 4


class _Part(NamedTuple):
    """What a register's name stands for: bytes `width` of the register `full`, from `first_bit` on."""

    full: str
    width: int
    first_bit: int = 0


def _general_registers() -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for letter in "abcd":
        full = f"e{letter}x"
        parts |= {full: _Part(full, 4), f"{letter}x": _Part(full, 2)}
        parts |= {f"{letter}l": _Part(full, 1), f"{letter}h": _Part(full, 1, first_bit=8)}
    for name in ("si", "di", "bp", "sp"):
        parts |= {f"e{name}": _Part(f"e{name}", 4), name: _Part(f"e{name}", 2)}
    return parts


_GENERAL = _general_registers()

_NOT_SAVED = re.compile(r"[xyz]mm[0-9]+|mm[0-7]|st(\([0-7]\))?|k[0-7]|[cdefgs]s|[cdt]r[0-7]|eip")
"""Registers that exist and are not in pt_regs, or mean nothing to a probe (segment and control registers)."""

_REGISTER = re.compile(r"%([a-z][a-z0-9]*(?:\([0-7]\))?)")
_SEGMENTED = re.compile(r"%[cdefgs]s:.*")
_MEMORY = re.compile(r"([^()]*)\(([^()]*)\)")
_SCALES = ("1", "2", "4", "8")


def parse_operand(text: str) -> tuple[Operand, int]:
    """The operand and its own width in bytes: a register's, else the word's."""
    if register := _REGISTER.fullmatch(text):
        return _parse_register(register[1])
    return _parse_other(text) or not_an_operand(text, _NAME), _WORD_BYTES


def _parse_register(name: str) -> tuple[Operand, int]:
    if part := _GENERAL.get(name):
        return Register(part.full, part.first_bit), part.width
    if _NOT_SAVED.fullmatch(name):
        return not_saved(f"%{name}"), _WORD_BYTES
    return Unavailable(f"%{name} is not a register of {_NAME}"), _WORD_BYTES


def _parse_other(text: str) -> Operand | None:
    if text.startswith("$"):
        return parse_value(text[1:])
    if _SEGMENTED.fullmatch(text):
        return Unavailable("memory relative to a segment register cannot be reached")
    if memory := _MEMORY.fullmatch(text):
        return _parse_registers(memory[1], [part.strip() for part in memory[2].split(",")])
    return parse_memory(text, base=None, word_bytes=_WORD_BYTES) if text else None


def _parse_registers(displacement: str, parts: list[str]) -> Operand | None:
    """`displacement(base,index,scale)`, of which any may be missing."""
    if displacement.endswith(GOTOFF):
        plain = _parse_registers(displacement.removesuffix(GOTOFF), parts)
        if not isinstance(plain, Memory) or plain.symbol is None:
            return plain
        return replace(plain, symbol=plain.symbol + GOTOFF)
    if isinstance(expression := parse_expression(displacement or "0"), Unavailable):
        return expression
    base, index, scale, *more = [*parts, "", ""][: max(3, len(parts))]
    if expression is None or more or not (base or index) or (scale and (scale not in _SCALES or not index)):
        return None
    for register in (base, index):
        part = _GENERAL.get(register[1:]) if register.startswith("%") else None
        if register and part is None:
            return Unavailable(f"the base is not a register of {_NAME}")
        if part is not None and part.width != _WORD_BYTES:
            return Unavailable(f"a base register of {part.width} bytes is not supported")
    return parse_memory(displacement, base[1:] or None, index[1:] or None, int(scale or "1"), word_bytes=_WORD_BYTES)
