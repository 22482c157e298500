"""The `nop` where the note says that the site is, and how long it is.

    90                nop                       sys/sdt.h's
    66 90             xchg %ax,%ax
    0f 1f 44 00 00    nopl 0x0(%rax,%rax,1)     opcode, ModRM, SIB, displacement
    2e 0f 1f 40 00    nopl %cs:0x0(%rax)

An uprobe overwrites the instruction at its address. In the middle of another instruction that corrupts the
traced program, so a note is believed only where the file has a `nop`. What a kernel does to a nop that is armed may
depend on its length (`kernel.nops`).
"""

from __future__ import annotations

from collections.abc import Mapping

from stapsdtd.elf.notes import UnusableNoteError

LONGEST_NOP_BYTES = 15

_X86 = ("x86-64", "x32", "i386")

# In memory order. Not here: Thumb's nops. The kernel has no uprobes on Thumb code, and would write an ARM
# breakpoint over two of its instructions.
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
    """Return the length in bytes of the nop that code begins with. Raises UnusableNoteError where there is none.

    code: the file's bytes at the location, LONGEST_NOP_BYTES of them or up to the segment's end.
    """
    if architecture in _X86:
        length = _x86_nop_bytes(code)
    elif architecture in _FIXED:
        length = next((len(nop) for nop in _FIXED[architecture] if code.startswith(nop)), 0)
    else:
        raise UnusableNoteError(f"what a nop is on {architecture} is not known, so a probe there could do harm")
    if not 0 < length <= len(code):
        raise UnusableNoteError(f"no nop at the location: bytes {code[:8].hex(' ') or 'missing'}")
    return length


def _x86_nop_bytes(code: bytes) -> int:
    """Of `90`, or `0f 1f /0`, with any operand-size (66) and cs (2e) prefixes; 0 where code begins with neither.

    `f3 90` is pause and no nop. What is cut off counts too.
    """
    opcode = code.lstrip(b"\x66\x2e")
    prefixes = len(code) - len(opcode)
    if opcode.startswith(b"\x90"):
        return prefixes + 1
    if opcode.startswith(b"\x0f\x1f") and len(opcode) > 2 and opcode[2] >> 3 & 7 == 0:
        return prefixes + 2 + _operand_bytes(opcode[2:])
    return 0


def _operand_bytes(code: bytes) -> int:
    """Of ModRM, and of SIB and displacement where ModRM has them (Intel SDM volume 2, tables 2-2 and 2-3)."""
    mode, base = code[0] >> 6, code[0] & 7
    if mode == 3:
        return 1
    has_sib = base == 4
    if has_sib:
        base = int.from_bytes(code[1:2]) & 7
    displacement = 4 if mode == 2 or (mode == 0 and base == 5) else mode
    return 1 + has_sib + displacement
