"""Operands of aarch64 as gcc and clang write them.

    5   -9   x0   w3   [x1]   [sp, 96]   [x29, #-8]   [x0, x1]   [x0, x1, lsl 3]   counter   table+24

A bare symbol is its address. These cannot be fetched: `[x0, w5, sxtw 3]`, whose index is a 32-bit register, and
`[x21, #:lo12:counter]`, which the linker may have changed together with the instruction that set x21.
"""

from __future__ import annotations

import re

from stapsdtd.arch.expressions import RELOCATED, not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.arch.record import Architecture, CallingConvention, numbered, one_of, same
from stapsdtd.model import Constant, Operand, Register, Unavailable

_NAME = "aarch64"
_WORD_BYTES = 8

_GENERAL = {
    **{f"x{number}": f"x{number}" for number in range(31)},
    "sp": "sp", "lr": "x30", "fp": "x29", "ip0": "x16", "ip1": "x17",
}  # fmt: skip
_BASES = _GENERAL | {"x31": "sp"}
"""What is a base by its number is the stack pointer, as for gdb; elsewhere, number 31 is the zero register."""
_HALVES = {**{f"w{number}": f"x{number}" for number in range(31)}, "wsp": "sp"}

_NOT_SAVED = re.compile(r"[bhsdqvz](?:[12]?[0-9]|3[01])(?:\.[0-9]*[bhsdq](?:\[[0-9]+\])?)?|p(?:1[0-5]|[0-9])|ffr")
"""Floating-point, vector and predicate registers are not in pt_regs."""

_MEMORY = re.compile(r"\[([^\[\]]*)\]")
_LOW_BITS = re.compile(r"#?:[a-z0-9_]+:.*")
_SHIFT = re.compile(r"(?:lsl|sxtx|uxtx)(?:\s+#?([0-4])|)")
"""sxtx and uxtx extend from 64 bits, so they have no effect."""

_EXTENSION = re.compile(r"[su]xtw(?:\s+#?[0-4])?")


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes: the register's, else a word's."""
    if text in _GENERAL:
        return Register(_GENERAL[text]), _WORD_BYTES
    if text in _HALVES:
        return Register(_HALVES[text]), 4
    if text in ("xzr", "wzr"):
        return Constant(0), _WORD_BYTES if text == "xzr" else 4
    return _parse_other(text) or not_an_operand(text, _NAME), _WORD_BYTES


def _parse_other(text: str) -> Operand | None:
    if _NOT_SAVED.fullmatch(text):
        return not_saved(text)
    if memory := _MEMORY.fullmatch(text):
        return _parse_memory([part.strip() for part in memory[1].split(",")])
    return parse_value(text.removeprefix("#"))


def _parse_memory(parts: list[str]) -> Operand | None:
    """Parse `base`, `base, displacement`, `base, index` or `base, index, shift`."""
    base, *rest = parts
    if base in _HALVES:
        return Unavailable("a base register of 4 bytes is not supported")
    if base not in _BASES:
        return Unavailable(f"the base is not a register of {_NAME}")
    match rest:
        case []:
            return parse_memory("", _BASES[base])
        case [displacement] if _LOW_BITS.fullmatch(displacement):
            return RELOCATED
        case [index] if index in _GENERAL and index != "sp":
            return parse_memory("", _BASES[base], _GENERAL[index])
        case [displacement]:
            return _parse_displacement(displacement.removeprefix("#"), _BASES[base])
        case [index, shift] if index in _HALVES and _EXTENSION.fullmatch(shift):
            return Unavailable(f"a 32-bit index, {index}, is not supported")
        case [index, shift] if index in _GENERAL and index != "sp" and (amount := _SHIFT.fullmatch(shift)):
            return parse_memory("", _BASES[base], _GENERAL[index], 1 << int(amount[1] or "0"))
        case _:
            return None


def _parse_displacement(text: str, base: str) -> Operand | None:
    """The assembler accepts only numbers here; `[x0, counter]` is not an operand."""
    return parse_memory(text, base) if isinstance(parse_value(text), Constant) else None


_CALLS = CallingConvention(
    arguments=tuple(f"x{number}" for number in range(8)),
    results=("x0", "x1"),
    stack_pointer="sp",
    has_copy_pointers=True,
    is_stack_final=True,
    has_even_pairs=True,
)

AARCH64 = Architecture(
    name=_NAME,
    elf=("EM_AARCH64", 64, "<"),
    machine="aarch64",
    word_bytes=_WORD_BYTES,
    nop_length=one_of("1f2003d5"),
    parse_operand=parse_operand,
    pt_regs=numbered([*(f"x{number}" for number in range(31)), "sp", "pc"]),
    program_counter="pc",
    tracefs=same("sp", "pc", *(f"x{number}" for number in range(31))),
    calls=_CALLS,
)
