"""Operands of x86-64 as gcc and clang write them, in AT&T syntax.

$-9   %r15b   %ah   (%rax)   -8(%rbp)   8+4(%rax)   8(%rbp,%rcx,4)   52+NBuffers(%rip)   table(,%rax,8)   $sym
"""

from __future__ import annotations

import re

from stapsdtd.arch.att import Part, Registers
from stapsdtd.arch.expressions import parse_memory
from stapsdtd.arch.record import Architecture, CallingConvention
from stapsdtd.arch.x86_nops import nop_length
from stapsdtd.model import Memory, Operand, Unavailable

_NAME = "x86-64"
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
    _NAME,
    _WORD_BYTES,
    _general_registers(),
    re.compile(r"[xyz]mm[0-9]+|mm[0-7]|st(\([0-7]\))?|k[0-7]|[cdefgs]s|r16|r1[7-9]|r2[0-9]|r3[01]|[cd]r[0-9]+|[re]ip"),
)


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes: the register's, else a word's."""
    return _REGISTERS.operand(text, _parse_registers)


def _parse_registers(displacement: str, parts: list[str]) -> Operand | None:
    if parts not in (["%rip"], ["%eip"]):
        return _REGISTERS.memory(displacement, parts)
    memory = parse_memory(displacement, base=None)
    if isinstance(memory, Memory) and memory.symbol is None:
        return Unavailable("relative to the %rip of an unknown instruction")
    return memory


# the host's structure, of 32-bit processes as well
PT_REGS = {
    "r15": 0, "r14": 1, "r13": 2, "r12": 3, "rbp": 4, "rbx": 5, "r11": 6, "r10": 7, "r9": 8, "r8": 9, "rax": 10,
    "rcx": 11, "rdx": 12, "rsi": 13, "rdi": 14, "rip": 16, "rsp": 19,
}  # fmt: skip

_TRACEFS = {
    **{f"r{name}": name for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp", "ip")},
    **{f"r{number}": f"r{number}" for number in range(8, 16)},
}

_CALLS = CallingConvention(
    arguments=("rdi", "rsi", "rdx", "rcx", "r8", "r9"),
    results=("rax", "rdx"),
    stack_pointer="rsp",
    return_pops=_WORD_BYTES,
    has_result_pointer=True,
)

X86_64 = Architecture(
    name=_NAME,
    elf=("EM_X86_64", 64, "<"),
    machine="x86_64",
    word_bytes=_WORD_BYTES,
    nop_length=nop_length,
    parse_operand=parse_operand,
    pt_regs=PT_REGS,
    program_counter="rip",
    tracefs=_TRACEFS,
    calls=_CALLS,
)
X32 = Architecture(name="x32", elf=("EM_X86_64", 32, "<"), machine="x86_64", word_bytes=8, nop_length=nop_length)
