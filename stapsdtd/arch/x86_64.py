"""Operands of x86-64 as gcc and clang write them, in AT&T syntax.

$-9   %r15b   %ah   (%rax)   -8(%rbp)   8+4(%rax)   8(%rbp,%rcx,4)   52+NBuffers(%rip)   table(,%rax,8)   $sym
"""

from __future__ import annotations

import re
from typing import NamedTuple

from stapsdtd.arch.att import MEMORY, NO_SEGMENTS, REGISTER, SCALES, SEGMENTED, Part, Registers
from stapsdtd.arch.expressions import RELOCATED, TOO_FAR, fits, not_an_operand, number_of
from stapsdtd.arch.record import Architecture
from stapsdtd.arch.x86_nops import nop_length
from stapsdtd.model import Address, Constant, Memory, Operand, Unavailable

_WORD_BYTES = 8


def _general_registers() -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for letter in "abcd":
        full = f"r{letter}x"
        parts |= {full: Part(full, 8), f"e{letter}x": Part(full, 4), f"{letter}x": Part(full, 2)}
        parts |= {f"{letter}l": Part(full, 1), f"{letter}h": Part(full, 1, first_bit=8)}
    for name in ("si", "di", "bp", "sp"):
        full = f"r{name}"
        parts |= {
            full: Part(full, 8),
            f"e{name}": Part(full, 4),
            name: Part(full, 2),
            f"{name}l": Part(full, 1),
        }
    for number in range(8, 16):
        full = f"r{number}"
        parts |= {full: Part(full, 8), f"{full}d": Part(full, 4), f"{full}w": Part(full, 2)}
        parts |= {f"{full}b": Part(full, 1)}
    return parts


_REGISTERS = Registers(
    "x86-64",
    _WORD_BYTES,
    _general_registers(),
    re.compile(r"[xyz]mm[0-9]+|mm[0-7]|st(\([0-7]\))?|k[0-7]|[cdefgs]s|r16|r1[7-9]|r2[0-9]|r3[01]|[cd]r[0-9]+|[re]ip"),
)

_NUMBER = r"(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})"
_SUM = re.compile(rf"[+-]?{_NUMBER}(?:[+-]{_NUMBER})*")
_TERM = re.compile(rf"([+-]?)({_NUMBER})")
_SYMBOL = r"[A-Za-z_.][\w.$]*"
_SYMBOLIC = re.compile(
    rf"(?:(?P<before>[+-]?{_NUMBER}(?:[+-]{_NUMBER})*)[+]|\+?)(?P<symbol>{_SYMBOL})(?P<rest>(?:[+-]{_NUMBER})*)"
)
_RELOCATED = re.compile(rf"[+-]?(?:{_NUMBER}[+-])*{_SYMBOL}[@-][-+\w.$@]*")


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes: the register's, else a word's."""
    if register := REGISTER.fullmatch(text):
        return _REGISTERS.value(register[1])
    return _parse_other(text), _WORD_BYTES


def _parse_other(text: str) -> Operand:
    if text.startswith("$"):
        if _SUM.fullmatch(text, 1):
            return Constant(_sum(text[1:]))
        if target := _symbolic(text[1:]):
            return target if isinstance(target, Unavailable) else Address(None, target.offset, target.symbol)
    elif SEGMENTED.fullmatch(text):
        return NO_SEGMENTS
    elif memory := MEMORY.fullmatch(text):
        return _parse_memory(memory[1], memory[2])
    elif _SUM.fullmatch(text):
        return _memory(None, _sum(text), None, 1, None)
    elif target := _symbolic(text):
        return target if isinstance(target, Unavailable) else Memory(None, target.offset, symbol=target.symbol)
    return not_an_operand(text, "x86-64")


class _Target(NamedTuple):
    symbol: str
    offset: int


def _symbolic(text: str) -> _Target | Unavailable | None:
    """Parse `52+CheckpointStats`, `seq.6-4`; None if there is no symbol."""
    if match := _SYMBOLIC.fullmatch(text):
        offset = _sum(match["before"] or "") + _sum(match["rest"])
        return _Target(match["symbol"], offset) if fits(offset) else TOO_FAR
    if _RELOCATED.fullmatch(text):
        return RELOCATED
    return None


def _parse_memory(displacement_text: str, address: str) -> Operand:
    """Parse `displacement(base,index,scale)`, of which any part may be missing."""
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
            return Unavailable("relative to the %rip of an unknown instruction")
        return _memory(None, displacement, None, 1, symbol)
    base_text, _, rest = address.partition(",")
    index_text, _, scale_text = rest.partition(",")
    scale_text = scale_text.strip()
    if scale_text not in SCALES or not (base_text or index_text):
        return Unavailable("not an operand of x86-64")
    base, index = (_REGISTERS.address(name.strip()) for name in (base_text, index_text))
    if isinstance(base, Unavailable):
        return base
    if isinstance(index, Unavailable):
        return index
    return _memory(base, displacement, index, int(scale_text or "1") if index else 1, symbol)


def _memory(base: str | None, displacement: int, index: str | None, scale: int, symbol: str | None) -> Operand:
    """Return memory, wrapping the displacement around; the processor has none wider than 32 bits, sign-extended."""
    displacement &= (1 << 64) - 1
    displacement -= displacement >> 63 << 64
    if not fits(displacement):
        return TOO_FAR
    return Memory(base, displacement, index, scale, symbol)


def _sum(text: str) -> int:
    """Evaluate `8+4-0x10`; as in gas, a leading zero means octal."""
    return sum(-number_of(digits) if sign == "-" else number_of(digits) for sign, digits in _TERM.findall(text))


# the host's structure, of 32-bit processes as well
PT_REGS = {
    "r15": 0, "r14": 1, "r13": 2, "r12": 3, "rbp": 4, "rbx": 5, "r11": 6, "r10": 7, "r9": 8, "r8": 9, "rax": 10,
    "rcx": 11, "rdx": 12, "rsi": 13, "rdi": 14, "rip": 16, "rsp": 19,
}  # fmt: skip

_TRACEFS = {
    **{f"r{name}": name for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp", "ip")},
    **{f"r{number}": f"r{number}" for number in range(8, 16)},
}

X86_64 = Architecture(
    name="x86-64",
    elf=("EM_X86_64", 64, "<"),
    machine="x86_64",
    word_bytes=_WORD_BYTES,
    nop_length=nop_length,
    parse_operand=parse_operand,
    pt_regs=PT_REGS,
    program_counter="rip",
    tracefs=_TRACEFS,
)
X32 = Architecture(name="x32", elf=("EM_X86_64", 32, "<"), machine="x86_64", word_bytes=8, nop_length=nop_length)
