"""Operands of 32-bit arm as gcc and clang write them.

    #5   #-9   r0   ip   [r3]   [fp, #-8]   [sp, #96]   [r3, r4]   [r0, r4, lsl #2]   #counter   table+12

gcc writes the address of a symbol with `#`, clang without. A bare symbol may also be memory, but only in a literal
pool, whose labels (`.L7`) are in no symbol table. An 8-byte value is in two registers, but the note names only one.
"""

from __future__ import annotations

import re

from stapsdtd.arch.expressions import RELOCATED, not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.arch.record import Architecture, numbered, one_of
from stapsdtd.model import Constant, Operand, Register, Unavailable

_NAME = "arm"
_WORD_BYTES = 4

_GENERAL = {
    **{f"r{number}": f"r{number}" for number in range(16)},
    **{f"a{number}": f"r{number - 1}" for number in range(1, 5)},
    **{f"v{number}": f"r{number + 3}" for number in range(1, 9)},
    "sb": "r9", "sl": "r10", "fp": "r11", "ip": "r12", "sp": "r13", "lr": "r14", "pc": "r15",
}  # fmt: skip

_NOT_SAVED = re.compile(r"[sd](?:[12]?[0-9]|3[01])|q(?:1[0-5]|[0-9])|[cs]psr|fpscr")
"""Floating-point and vector registers are not in pt_regs, and status registers mean nothing to a probe."""

_MEMORY = re.compile(r"\[([^\[\]]*)\]")
_RELOCATED = re.compile(r"#?:[a-z0-9_]+:.*")
_LEFT_SHIFT = re.compile(r"lsl\s+#?([12]?[0-9]|3[01])")
_RIGHT_SHIFT = re.compile(r"(?:lsr|asr|ror)\s+#?[0-9]{1,2}|rrx")


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes, which is always a word's."""
    if text in _GENERAL:
        return Register(_GENERAL[text]), _WORD_BYTES
    return _parse_other(text) or not_an_operand(text, _NAME), _WORD_BYTES


def _parse_other(text: str) -> Operand | None:
    if _NOT_SAVED.fullmatch(text):
        return not_saved(text)
    if _RELOCATED.fullmatch(text):
        return RELOCATED
    if memory := _MEMORY.fullmatch(text):
        return _parse_memory([part.strip() for part in memory[1].split(",")])
    return parse_value(text.removeprefix("#"))


def _parse_memory(parts: list[str]) -> Operand | None:
    """Parse `base`, `base, displacement`, `base, index` or `base, index, shift`."""
    base, rest = _GENERAL.get(parts[0]), parts[1:]
    if base is None:
        return Unavailable(f"the base is not a register of {_NAME}")
    if base == "r15":
        return Unavailable("relative to the pc of an unknown instruction")
    if rest and rest[0].startswith("-") and rest[0][1:] in _GENERAL:
        return Unavailable("a subtracted index is not supported")
    match rest:
        case []:
            return parse_memory("", base, word_bytes=_WORD_BYTES)
        case [displacement] if _RELOCATED.fullmatch(displacement):
            return RELOCATED
        case [index] if index.removeprefix("+") in _GENERAL:
            return _parse_index(base, index, 0)
        case [displacement]:
            return _parse_displacement(displacement.removeprefix("#"), base)
        case [index, shift] if index.removeprefix("+") in _GENERAL and (amount := _LEFT_SHIFT.fullmatch(shift)):
            return _parse_index(base, index, int(amount[1]))
        case [index, shift] if index.removeprefix("+") in _GENERAL and _RIGHT_SHIFT.fullmatch(shift):
            return Unavailable("a right-shifted index is not supported")
        case _:
            return None


def _parse_index(base: str, index: str, shift: int) -> Operand | None:
    full = _GENERAL[index.removeprefix("+")]
    return parse_memory("", base, full, 1 << shift, word_bytes=_WORD_BYTES) if full != "r15" else None


def _parse_displacement(text: str, base: str) -> Operand | None:
    """The assembler accepts only numbers here; `[r0, counter]` is not an operand."""
    return parse_memory(text, base, word_bytes=_WORD_BYTES) if isinstance(parse_value(text), Constant) else None


# The second one is `mov r0, r0`, before ARMv6K; of Thumb's the second is `mov r8, r8`, the third nop.w.
ARM = Architecture(
    name=_NAME,
    elf=("EM_ARM", 32, "<"),
    machine="aarch64",
    word_bytes=_WORD_BYTES,
    nop_length=one_of("00f020e3", "0000a0e1"),
    parse_operand=parse_operand,
    pt_regs=numbered(f"r{number}" for number in range(15)) | {"r15": 32},
    program_counter="r15",
    unpatchable_nop_length=one_of("00bf", "c046", "aff30080"),
    why_unpatchable="it is Thumb code, in which the kernel has no uprobes: it would write ARM's breakpoint over two "
    "instructions; compile the program with -marm",
)
