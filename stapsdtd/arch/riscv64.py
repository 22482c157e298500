"""Operands of riscv64 as gcc and clang write them.

    5   -9   a0   s0   0(a1)   -88(s0)   8(sp)   counter   table+24

A bare symbol is its address. `%lo(counter)(a5)` cannot be fetched: the linker may have removed the instruction that set
a5.
"""

from __future__ import annotations

import re

from stapsdtd.arch.expressions import RELOCATED, not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.arch.record import Architecture, numbered, one_of, same
from stapsdtd.model import Constant, Operand, Register, Unavailable

_NAME = "riscv64"
_WORD_BYTES = 8

_BY_NUMBER = [
    *("zero", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1"),
    *(f"a{number}" for number in range(8)),
    *(f"s{number}" for number in range(2, 12)),
    *(f"t{number}" for number in range(3, 7)),
]
_GENERAL = {
    **{name: name for name in _BY_NUMBER},
    **{f"x{number}": name for number, name in enumerate(_BY_NUMBER)},
    "fp": "s0",
}

_NOT_SAVED = re.compile(r"f(?:[12]?[0-9]|3[01])|v(?:[12]?[0-9]|3[01])|ft(?:1[01]|[0-9])|fs(?:1[01]|[0-9])|fa[0-7]|fcsr")
"""Floating-point and vector registers are not in pt_regs."""

_RELOCATED = re.compile(r"%[a-z0-9_]+\(.*")
_MEMORY = re.compile(r"([^()]*)\(([^()]*)\)")


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes, which is always a word's."""
    return _parse(text) or not_an_operand(text, _NAME), _WORD_BYTES


def _parse(text: str) -> Operand | None:
    if register := _GENERAL.get(text):
        return Constant(0) if register == "zero" else Register(register)
    if _NOT_SAVED.fullmatch(text):
        return not_saved(text)
    if _RELOCATED.fullmatch(text):
        return RELOCATED
    if memory := _MEMORY.fullmatch(text):
        return _parse_memory(memory[1], memory[2].strip())
    return parse_value(text)


def _parse_memory(displacement: str, base: str) -> Operand | None:
    if base not in _GENERAL:
        return Unavailable(f"the base is not a register of {_NAME}")
    return parse_memory(displacement, None if _GENERAL[base] == "zero" else _GENERAL[base])


RISCV64 = Architecture(
    name=_NAME,
    elf=("EM_RISCV", 64, "<"),
    machine="riscv64",
    word_bytes=_WORD_BYTES,
    nop_length=one_of("13000000", "0100"),
    parse_operand=parse_operand,
    pt_regs=numbered(["pc", *_BY_NUMBER[1:]]),
    program_counter="pc",
    tracefs={"pc": "epc"} | same(*_BY_NUMBER[1:]),
)
