"""Operands of x86-64 as gcc and clang write them, in AT&T syntax.

    $-9   %r15b   %ah   (%rax)   -8(%rbp)   8+4(%rax)   NBuffers(%rip)   8(%rbp,%rcx,4)

The last two are recognised and not fetched yet.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stapsdtd.model import Constant, Memory, Operand, Register, Unavailable

_WORD_BYTES = 8


class _Part(NamedTuple):
    """What a register's name stands for: bytes `width` of the register `full`, from `first_bit` on."""

    full: str
    width: int
    first_bit: int = 0


def _general_registers() -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for letter in "abcd":
        full = f"r{letter}x"
        parts |= {full: _Part(full, 8), f"e{letter}x": _Part(full, 4), f"{letter}x": _Part(full, 2)}
        parts |= {f"{letter}l": _Part(full, 1), f"{letter}h": _Part(full, 1, first_bit=8)}
    for name in ("si", "di", "bp", "sp"):
        full = f"r{name}"
        parts |= {
            full: _Part(full, 8),
            f"e{name}": _Part(full, 4),
            name: _Part(full, 2),
            f"{name}l": _Part(full, 1),
        }
    for number in range(8, 16):
        full = f"r{number}"
        parts |= {full: _Part(full, 8), f"{full}d": _Part(full, 4), f"{full}w": _Part(full, 2)}
        parts |= {f"{full}b": _Part(full, 1)}
    return parts


_GENERAL = _general_registers()

_NOT_SAVED = re.compile(r"[xyz]mm[0-9]+|mm[0-7]|st(\([0-7]\))?|k[0-7]|[cdefgs]s|r16|r1[7-9]|r2[0-9]|r3[01]|[cd]r[0-9]+")
"""Registers that exist and are not in pt_regs, or mean nothing to a probe (segment and control registers)."""

_NUMBER = r"(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})"
_SUM = re.compile(rf"[+-]?{_NUMBER}(?:[+-]{_NUMBER})*")
_TERM = re.compile(rf"([+-]?)({_NUMBER})")
_SYMBOLIC = re.compile(r"(?=[^A-Za-z_.]*[A-Za-z_.])[-+@\w.$]+")
_REGISTER = re.compile(r"%([a-z][a-z0-9]*(?:\([0-7]\))?)")
_SEGMENTED = re.compile(r"%[cdefgs]s:.*")
_MEMORY = re.compile(r"([^()]*)\(([^()]*)\)")


def parse_operand(text: str) -> tuple[Operand, int]:
    """The operand and its own width in bytes: a register's, else the word's."""
    if register := _REGISTER.fullmatch(text):
        return _parse_register(register[1])
    return _parse_other(text), _WORD_BYTES


def _parse_register(name: str) -> tuple[Operand, int]:
    if part := _GENERAL.get(name):
        return Register(part.full, part.first_bit), part.width
    if name in ("rip", "eip") or _NOT_SAVED.fullmatch(name):
        return Unavailable(f"%{name} is not among the registers saved at a probe"), _WORD_BYTES
    return Unavailable(f"%{name} is not a register of x86-64"), _WORD_BYTES


def _parse_other(text: str) -> Operand:
    if text.startswith("$"):
        if _SUM.fullmatch(text, 1):
            return Constant(_sum(text[1:]))
        if _SYMBOLIC.fullmatch(text, 1):
            return Unavailable("the address of a symbol is not supported yet")
    elif _SEGMENTED.fullmatch(text):
        return Unavailable("memory relative to a segment register is not supported")
    elif memory := _MEMORY.fullmatch(text):
        return _parse_memory(memory[1], memory[2])
    elif _SUM.fullmatch(text):
        return Unavailable("an absolute address is not supported yet")
    elif _SYMBOLIC.fullmatch(text):
        return Unavailable("memory at a symbol is not supported yet")
    return Unavailable("not an operand of x86-64" if text else "the operand is missing")


def _parse_memory(displacement_text: str, address: str) -> Operand:
    """`displacement(base)`; the processor has no displacement wider than 32 bits, which it sign-extends."""
    if "," in address:
        return Unavailable("base plus index is not supported yet")
    if displacement_text and not _SUM.fullmatch(displacement_text):
        return Unavailable("memory at a symbol is not supported yet")
    if address in ("%rip", "%eip"):
        return Unavailable("memory relative to %rip is not supported yet")
    base = _GENERAL.get(address[1:]) if address.startswith("%") else None
    if base is None:
        return Unavailable("the base is not a register of x86-64")
    if base.width != _WORD_BYTES:
        return Unavailable(f"a base register of {base.width} bytes is not supported")
    displacement = _sum(displacement_text) & (1 << 64) - 1
    displacement -= displacement >> 63 << 64
    if not -(1 << 31) <= displacement < 1 << 31:
        return Unavailable("the displacement does not fit 32 bits")
    return Memory(base.full, displacement)


def _sum(text: str) -> int:
    """The value of `8+4-0x10`; like gas, a leading zero makes a number octal."""
    return sum(-_number(digits) if sign == "-" else _number(digits) for sign, digits in _TERM.findall(text))


def _number(digits: str) -> int:
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    is_octal = digits.startswith("0") and not set(digits) & {"8", "9"}
    return int(digits, 8 if is_octal else 10)
