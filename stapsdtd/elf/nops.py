"""Check that there is a `nop` at a note's location, and determine its length.

    90                nop                       sys/sdt.h's
    66 90             xchg %ax,%ax
    0f 1f 44 00 00    nopl 0x0(%rax,%rax,1)     opcode, ModRM, SIB, displacement
    2e 0f 1f 40 00    nopl %cs:0x0(%rax)

A uprobe overwrites the instruction at its address. In the middle of another instruction that would corrupt the traced
program, so a note is accepted only if the file has a `nop` there. What the kernel does to an armed nop may depend on
its length (`kernel.nops`).
"""

from __future__ import annotations

from collections.abc import Mapping

from stapsdtd.elf.notes import UnusableNoteError

LONGEST_NOP_BYTES = 15

_X86 = ("x86-64", "x32", "i386")

# In memory order. Thumb's nops are left out: the kernel has no uprobes for Thumb code, and would overwrite two
# instructions with an ARM breakpoint.
_FIXED: Mapping[str, tuple[bytes, ...]] = {
    "aarch64": (bytes.fromhex("1f2003d5"),),
    "arm": (bytes.fromhex("00f020e3"), bytes.fromhex("0000a0e1")),  # nop; mov r0, r0 before ARMv6K
    "riscv64": (bytes.fromhex("13000000"), bytes.fromhex("0100")),
    "s390x": (bytes.fromhex("0700"), bytes.fromhex("0707"), bytes.fromhex("47000000")),
    "ppc64le": (bytes.fromhex("00000060"),),
    "ppc64": (bytes.fromhex("60000000"),),
    "loongarch64": (bytes.fromhex("00004003"),),
}


def nop_bytes(architecture: str, code: bytes) -> int:
    """Return the length in bytes of the nop that code begins with. Raises UnusableNoteError if there is none.

    code: LONGEST_NOP_BYTES of the file at the location, or fewer at the segment's end.
    """
    if architecture in _X86:
        length = _x86_nop_bytes(code)
    elif architecture in _FIXED:
        length = next((len(nop) for nop in _FIXED[architecture] if code.startswith(nop)), 0)
    else:
        raise UnusableNoteError(f"the nop of {architecture} is unknown, so a probe could corrupt the program")
    if not 0 < length <= len(code):
        raise UnusableNoteError(f"no nop at the location: bytes {code[:8].hex(' ') or 'missing'}")
    return length


def _x86_nop_bytes(code: bytes) -> int:
    """Return the length of `90` or `0f 1f /0`, with any operand-size (66) and cs (2e) prefixes; 0 for anything else.

    `f3 90` is pause, not a nop. The length includes bytes beyond the end of code.
    """
    opcode = code.lstrip(b"\x66\x2e")
    prefixes = len(code) - len(opcode)
    if opcode.startswith(b"\x90"):
        return prefixes + 1
    if opcode.startswith(b"\x0f\x1f") and len(opcode) > 2 and opcode[2] >> 3 & 7 == 0:
        return prefixes + 2 + _operand_bytes(opcode[2:])
    return 0


def _operand_bytes(code: bytes) -> int:
    """Return the length of ModRM and the SIB and displacement it calls for (Intel SDM volume 2, tables 2-2 and 2-3)."""
    mode, base = code[0] >> 6, code[0] & 7
    if mode == 3:
        return 1
    has_sib = base == 4
    if has_sib:
        base = int.from_bytes(code[1:2]) & 7
    displacement = 4 if mode == 2 or (mode == 0 and base == 5) else mode
    return 1 + has_sib + displacement
