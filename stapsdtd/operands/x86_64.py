"""Operands of x86-64 as gcc and clang write them, in AT&T syntax.

$-9   %r15b   %ah   (%rax)   -8(%rbp)   8+4(%rax)   8(%rbp,%rcx,4)   52+NBuffers(%rip)   table(,%rax,8)   $sym
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable

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
_SYMBOL = r"[A-Za-z_.][\w.$]*"
_SYMBOLIC = re.compile(
    rf"(?:(?P<before>[+-]?{_NUMBER}(?:[+-]{_NUMBER})*)[+]|\+?)(?P<symbol>{_SYMBOL})(?P<rest>(?:[+-]{_NUMBER})*)"
)
_RELOCATED = re.compile(rf"[+-]?(?:{_NUMBER}[+-])*{_SYMBOL}[@-][-+\w.$@]*")
_REGISTER = re.compile(r"%([a-z][a-z0-9]*(?:\([0-7]\))?)")
_SEGMENTED = re.compile(r"%[cdefgs]s:.*")
_MEMORY = re.compile(r"([^()]*)\(([^()]*)\)")


_TOO_FAR = Unavailable("the displacement does not fit 32 bits")


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
        if target := _symbolic(text[1:]):
            return target if isinstance(target, Unavailable) else Address(None, target.offset, target.symbol)
    elif _SEGMENTED.fullmatch(text):
        return Unavailable("memory relative to a segment register cannot be reached")
    elif memory := _MEMORY.fullmatch(text):
        return _parse_memory(memory[1], memory[2])
    elif _SUM.fullmatch(text):
        return _memory(None, _sum(text), None, 1, None)
    elif target := _symbolic(text):
        return target if isinstance(target, Unavailable) else Memory(None, target.offset, symbol=target.symbol)
    return Unavailable("not an operand of x86-64" if text else "the operand is missing")


class _Target(NamedTuple):
    symbol: str
    offset: int


def _symbolic(text: str) -> _Target | Unavailable | None:
    """`52+CheckpointStats`, `seq.6-4`; None where it names no symbol."""
    if found := _SYMBOLIC.fullmatch(text):
        offset = _sum(found["before"] or "") + _sum(found["rest"])
        return _Target(found["symbol"], offset) if _fits(offset) else _TOO_FAR
    if _RELOCATED.fullmatch(text):
        return Unavailable("what the linker made of this relocation is not known")
    return None


def _parse_memory(displacement_text: str, address: str) -> Operand:
    """`displacement(base,index,scale)`, any of which may be missing."""
    symbol, displacement = None, 0
    if target := _symbolic(displacement_text):
        if isinstance(target, Unavailable):
            return target
        symbol, displacement = target
    elif displacement_text and not _SUM.fullmatch(displacement_text):
        return Unavailable("not an operand of x86-64")
    else:
        displacement = _sum(displacement_text)
    if address in ("%rip", "%eip"):
        if symbol is None:
            return Unavailable("which instruction's %rip is meant is not known")
        return _memory(None, displacement, None, 1, symbol)
    base_text, _, rest = address.partition(",")
    index_text, _, scale_text = rest.partition(",")
    if scale_text not in ("", "1", "2", "4", "8") or not (base_text or index_text):
        return Unavailable("not an operand of x86-64")
    registers = []
    for name in (base_text.strip(), index_text.strip()):
        part = _GENERAL.get(name[1:]) if name.startswith("%") else None
        if name and part is None:
            return Unavailable("the base is not a register of x86-64")
        if part is not None and part.width != _WORD_BYTES:
            return Unavailable(f"a base register of {part.width} bytes is not supported")
        registers.append(part.full if part else None)
    base, index = registers
    return _memory(base, displacement, index, int(scale_text or "1") if index else 1, symbol)


def _memory(base: str | None, displacement: int, index: str | None, scale: int, symbol: str | None) -> Operand:
    """The processor has no displacement wider than 32 bits, which it sign-extends."""
    displacement &= (1 << 64) - 1
    displacement -= displacement >> 63 << 64
    if not _fits(displacement):
        return _TOO_FAR
    return Memory(base, displacement, index, scale, symbol)


def _fits(displacement: int) -> bool:
    return -(1 << 31) <= displacement < 1 << 31


def _sum(text: str) -> int:
    """The value of `8+4-0x10`; like gas, a leading zero makes a number octal."""
    return sum(-_number(digits) if sign == "-" else _number(digits) for sign, digits in _TERM.findall(text))


def _number(digits: str) -> int:
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    is_octal = digits.startswith("0") and not set(digits) & {"8", "9"}
    return int(digits, 8 if is_octal else 10)
