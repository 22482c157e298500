"""The nops of x86: `90` and `0f 1f /0`, with prefixes.

90                nop                       sys/sdt.h's
66 90             xchg %ax,%ax
0f 1f 44 00 00    nopl 0x0(%rax,%rax,1)     opcode, ModRM, SIB, displacement
2e 0f 1f 40 00    nopl %cs:0x0(%rax)
"""

from __future__ import annotations


def nop_length(code: bytes) -> int:
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
