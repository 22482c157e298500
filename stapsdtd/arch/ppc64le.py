"""Operands of ppc64le as gcc and clang write them; sys/sdt.h puts an `i` before constants.

    i42   i-9   3   %r3   8(9)   -16(%r31)   3,9   %r3,%r9   counter   table+24

A single number is a register, two are base and index, and a symbol is its address. Base 0 means no base.
`.LC1@toc@l(7)` cannot be fetched: the linker may have changed it together with the instruction that set register 7.
"""

from __future__ import annotations

import re

from stapsdtd.arch.expressions import not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.arch.record import Architecture, numbered, one_of
from stapsdtd.model import Constant, Operand, Register, Unavailable

_NAME = "ppc64le"
_WORD_BYTES = 8

_GENERAL = {
    f"{prefix}{number}": f"r{number}" for number in range(32) for prefix in ("", "r", "%r")
}  # names without `%` appear in hand-written assembly

_NOT_SAVED = re.compile(r"%?(?:[fv](?:[12]?[0-9]|3[01])|vs(?:[1-5]?[0-9]|6[0-3])|cr[0-7]|vrsave|vscr|fpscr)")
"""Floating-point and vector registers are not in pt_regs, and condition fields are meaningless at a probe."""

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
    if text.startswith("i") and isinstance(constant := parse_value(text[1:]), Constant):
        return constant
    if memory := _MEMORY.fullmatch(text):
        return _parse_memory(memory[1], memory[2].strip(), None)
    if "," in text:
        base, _, index = text.partition(",")
        return _parse_memory("", base.strip(), index.strip())
    value = parse_value(text)
    return None if isinstance(value, Constant) else value


def _parse_memory(displacement: str, base: str, index: str | None) -> Operand | None:
    if base not in _GENERAL or (index is not None and index not in _GENERAL):
        return Unavailable(f"the base is not a register of {_NAME}")
    registers = [_GENERAL[base]] if _GENERAL[base] != "r0" else []
    registers += [_GENERAL[index]] if index is not None else []
    first, second = [*registers, None, None][:2]
    return parse_memory(displacement, first, second)


_REGISTERS = [f"r{number}" for number in range(32)]

PPC64LE = Architecture(
    name=_NAME,
    elf=("EM_PPC64", 64, "<"),
    machine="ppc64le",
    word_bytes=_WORD_BYTES,
    nop_length=one_of("00000060"),
    parse_operand=parse_operand,
    pt_regs=numbered([*_REGISTERS, "nip"]),
    program_counter="nip",
    tracefs={"nip": "nip"} | {name: f"gp{name}" for name in _REGISTERS},
)
PPC64 = Architecture(
    name="ppc64", elf=("EM_PPC64", 64, ">"), machine="", word_bytes=_WORD_BYTES, nop_length=one_of("60000000")
)
