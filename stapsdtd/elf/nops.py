"""Is there a `nop` where the note says that the site is?

An uprobe overwrites the instruction at its address. In the middle of another instruction that corrupts the
traced program, so a note is believed only where the file has the `nop` that sys/sdt.h puts there.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def _is_x86_nop(code: bytes) -> bool:
    """`90`, or `0f 1f /0`, with any operand-size (66) and cs (2e) prefixes; `f3 90` is pause and no nop."""
    opcode = code.lstrip(b"\x66\x2e")
    if opcode.startswith(b"\x0f\x1f"):
        return len(opcode) > 2 and opcode[2] >> 3 & 7 == 0
    return opcode.startswith(b"\x90")


def why_not_nop(architecture: str, code: bytes) -> str | None:
    """None where code begins with a nop of the architecture, else the reason, fit for a user.

    code: the file's bytes at the location, LONGEST_NOP_BYTES of them or up to the segment's end.
    """
    if architecture in _X86:
        is_nop = _is_x86_nop(code)
    elif architecture in _FIXED:
        is_nop = code.startswith(_FIXED[architecture])
    else:
        return f"what a nop is on {architecture} is not known, so a probe there could do harm"
    return None if is_nop else f"no nop at the location: bytes {code[:8].hex(' ') or 'missing'}"
