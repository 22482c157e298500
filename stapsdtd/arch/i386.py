"""Operands of i386 as gcc -m32 and clang -m32 write them, in AT&T syntax.

    $-9   $counter   %eax   %ah   (%edx)   -8(%ebp)   (%ebx,%eax,4)   counter   pairs(,%eax,4)   table+4(%ecx)

Position-independent code addresses variables relative to the global offset table, whose address is in a register,
`hidden@GOTOFF(%eax)`. Thread-local variables, `%gs:mine@ntpoff`, cannot be fetched. An 8-byte value is in two
registers, but the note names only one.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from stapsdtd.arch.att import Part, Registers
from stapsdtd.arch.expressions import GOTOFF
from stapsdtd.arch.record import Architecture
from stapsdtd.arch.x86_64 import PT_REGS
from stapsdtd.arch.x86_nops import nop_length
from stapsdtd.model import Memory, Operand

_NAME = "i386"
_WORD_BYTES = 4


def _general_registers() -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for letter in "abcd":
        full = f"e{letter}x"
        parts |= {full: Part(full, 4), f"{letter}x": Part(full, 2)}
        parts |= {f"{letter}l": Part(full, 1), f"{letter}h": Part(full, 1, first_bit=8)}
    for name in ("si", "di", "bp", "sp"):
        # gcc -m32 calls the lowest byte sil, a name of 64-bit code
        parts |= {f"e{name}": Part(f"e{name}", 4), name: Part(f"e{name}", 2), f"{name}l": Part(f"e{name}", 1)}
    return parts


_REGISTERS = Registers(
    _NAME,
    _WORD_BYTES,
    _general_registers(),
    re.compile(r"[xyz]mm[0-9]+|mm[0-7]|st(\([0-7]\))?|k[0-7]|[cdefgs]s|[cdt]r[0-7]|eip"),
)


def parse_operand(text: str) -> tuple[Operand, int]:
    """Return the operand and its width in bytes: the register's, else a word's."""
    return _REGISTERS.operand(text, _parse_registers)


def _parse_registers(displacement: str, parts: list[str]) -> Operand | None:
    """Parse `displacement(base,index,scale)`, of which any part may be missing."""
    if displacement.endswith(GOTOFF):
        plain = _parse_registers(displacement.removesuffix(GOTOFF), parts)
        if not isinstance(plain, Memory) or plain.symbol is None:
            return plain
        return replace(plain, symbol=plain.symbol + GOTOFF)
    return _REGISTERS.memory(displacement, parts)


I386 = Architecture(
    name=_NAME,
    elf=("EM_386", 32, "<"),
    machine="x86_64",
    word_bytes=_WORD_BYTES,
    nop_length=nop_length,
    parse_operand=parse_operand,
    pt_regs={f"e{name[1:]}": index for name, index in PT_REGS.items() if not name[1:].isdecimal()},
    program_counter="eip",
    tracefs={f"e{name}": name for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp", "ip")},
)
