"""Operands of s390x as gcc and clang write them: `displacement(index,base)`.

    71   -9   %r2   0(%r3)   -28(%r15)   8(%r4,%r1)   hidden   table+24

A bare symbol is its address. %r0 as base or index means none.
"""

from __future__ import annotations

import re

from stapsdtd.arch.expressions import not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.arch.record import Architecture, numbered, one_of, same
from stapsdtd.model import Operand, Register, Unavailable

_NAME = "s390x"
_WORD_BYTES = 8

_GENERAL = {f"%r{number}": f"r{number}" for number in range(16)}

_NOT_SAVED = re.compile(r"%(?:[fac](?:1[0-5]|[0-9])|v(?:[12]?[0-9]|3[01]))")
"""Floating-point, access, control and vector registers are not in pt_regs."""

_REGISTER = re.compile(r"%[a-z][a-z0-9]*")
_MEMORY = re.compile(r"([^()]*)\(([^()]*)\)")


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes, which is always a word's."""
    return _parse(text) or not_an_operand(text, _NAME), _WORD_BYTES


def _parse(text: str) -> Operand | None:
    if register := _GENERAL.get(text):
        return Register(register)
    if _NOT_SAVED.fullmatch(text):
        return not_saved(text)
    if _REGISTER.fullmatch(text):
        return Unavailable(f"{text} is not a register of {_NAME}")
    if memory := _MEMORY.fullmatch(text):
        return _parse_memory(memory[1], [part.strip() for part in memory[2].split(",")])
    return parse_value(text)


def _parse_memory(displacement: str, registers: list[str]) -> Operand | None:
    """Parse `(base)`, `(index,base)` or `(,base)`."""
    if len(registers) > 2:
        return None
    if len(registers) == 2 and not registers[0]:
        registers = registers[1:]
    if not all(register in _GENERAL for register in registers):
        return Unavailable(f"the base is not a register of {_NAME}")
    used = [_GENERAL[register] for register in reversed(registers) if register != "%r0"]
    base, index = [*used, None, None][:2]
    return parse_memory(displacement, base, index)


S390X = Architecture(
    name=_NAME,
    elf=("EM_S390", 64, ">"),
    machine="s390x",
    word_bytes=_WORD_BYTES,
    nop_length=one_of("0700", "0707", "47000000"),
    parse_operand=parse_operand,
    pt_regs=numbered(["pswm", "pswa", *_GENERAL.values()], 1),
    program_counter="pswa",
    tracefs=same(*_GENERAL.values()),
)
