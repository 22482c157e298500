"""Operands of loongarch64.

    5   -9   $r4   $a0   [$r4, 8]   $r4,8   $r12,$r13   counter   table+24

gcc writes memory as in its instructions, `$r4,8`, other tools use brackets. A bare symbol is its address.
"""

from __future__ import annotations

import re

from stapsdtd.arch.expressions import RELOCATED, not_an_operand, not_saved, parse_memory, parse_value
from stapsdtd.arch.record import Architecture, numbered, one_of, same
from stapsdtd.model import Constant, Operand, Register, Unavailable

_NAME = "loongarch64"
_WORD_BYTES = 8

_ABI_NAMES = [
    *("zero", "ra", "tp", "sp"),
    *(f"a{number}" for number in range(8)),
    *(f"t{number}" for number in range(9)),
    *("u0", "fp"),
    *(f"s{number}" for number in range(9)),
]
_GENERAL = {
    **{f"$r{number}": f"r{number}" for number in range(32)},
    **{f"${name}": f"r{number}" for number, name in enumerate(_ABI_NAMES)},
    "$v0": "r4", "$v1": "r5", "$x": "r21", "$s9": "r22",
}  # fmt: skip

_NOT_SAVED = re.compile(
    r"\$(?:(?:f|vr|xr)(?:[12]?[0-9]|3[01])|fa[0-7]|ft(?:1[0-5]|[0-9])|fs[0-7]|fcc[0-7]|fcsr[0-3]|scr[0-3])"
)
"""Floating-point and vector registers are not in pt_regs."""

_REGISTER = re.compile(r"\$[a-z][a-z0-9]*")
_RELOCATED = re.compile(r"%[a-z0-9_]+\(.*")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes, which is always a word's."""
    return _parse(text) or not_an_operand(text, _NAME), _WORD_BYTES


def _parse(text: str) -> Operand | None:
    if register := _GENERAL.get(text):
        return Constant(0) if register == "r0" else Register(register)
    if _NOT_SAVED.fullmatch(text):
        return not_saved(text)
    if _REGISTER.fullmatch(text):
        return Unavailable(f"{text} is not a register of {_NAME}")
    if _RELOCATED.fullmatch(text):
        return RELOCATED
    if memory := _BRACKETS.fullmatch(text):
        return _parse_memory(memory[1])
    return _parse_memory(text) if "," in text else parse_value(text)


def _parse_memory(text: str) -> Operand | None:
    """Parse `base`, `base, displacement` or `base, index`."""
    base_name, comma, rest = (part.strip() for part in text.partition(","))
    if base_name not in _GENERAL:
        return Unavailable(f"the base is not a register of {_NAME}")
    base = None if _GENERAL[base_name] == "r0" else _GENERAL[base_name]
    if rest in _GENERAL:
        registers = [full for full in (base, _GENERAL[rest]) if full not in (None, "r0")]
        first, second = [*registers, None, None][:2]
        return parse_memory("", first, second)
    if _RELOCATED.fullmatch(rest):
        return RELOCATED
    if comma and not isinstance(parse_value(rest), Constant):
        return None
    return parse_memory(rest, base)


_REGISTERS = [f"r{number}" for number in range(32)]

LOONGARCH64 = Architecture(
    name=_NAME,
    elf=("EM_LOONGARCH", 64, "<"),
    machine="loongarch64",
    word_bytes=_WORD_BYTES,
    nop_length=one_of("00004003"),
    parse_operand=parse_operand,
    pt_regs=numbered(_REGISTERS) | {"csr_era": 33},
    program_counter="csr_era",
    tracefs=same("csr_era", *_REGISTERS),
)
