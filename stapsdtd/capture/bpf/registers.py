"""Where each register of an operand is in struct pt_regs, in words.

The first words of the kernel's structure are those of arch/*/include/uapi/asm/ptrace.h, against which a test holds
them. Of a 32-bit process the host's own structure has the registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def _numbered(names: Iterable[str], first: int = 0) -> dict[str, int]:
    return {name: place for place, name in enumerate(names, first)}


_X86_64 = {
    "r15": 0, "r14": 1, "r13": 2, "r12": 3, "rbp": 4, "rbx": 5, "r11": 6, "r10": 7, "r9": 8, "r8": 9, "rax": 10,
    "rcx": 11, "rdx": 12, "rsi": 13, "rdi": 14, "rip": 16, "rsp": 19,
}  # fmt: skip
_I386 = {f"e{name[1:]}": place for name, place in _X86_64.items() if not name[1:].isdecimal()}
_AARCH64 = _numbered(f"x{number}" for number in range(31)) | {"sp": 31, "pc": 32}
_ARM = _numbered(f"r{number}" for number in range(15)) | {"r15": 32}
_RISCV64 = _numbered(
    ["pc", "ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", *(f"a{number}" for number in range(8)),
     *(f"s{number}" for number in range(2, 12)), *(f"t{number}" for number in range(3, 7))]
)  # fmt: skip
_S390X = _numbered(["pswm", "pswa", *(f"r{number}" for number in range(16))], 1)
_PPC64LE = _numbered(f"r{number}" for number in range(32)) | {"nip": 32}
_LOONGARCH64 = _numbered(f"r{number}" for number in range(32)) | {"csr_era": 33}

PT_REGS_INDEX: Mapping[str, Mapping[str, int]] = {
    "x86-64": _X86_64, "i386": _I386, "aarch64": _AARCH64, "arm": _ARM, "riscv64": _RISCV64, "s390x": _S390X,
    "ppc64le": _PPC64LE, "loongarch64": _LOONGARCH64,
}  # fmt: skip

INSTRUCTION_POINTERS: Mapping[str, str] = {
    "x86-64": "rip", "i386": "eip", "aarch64": "pc", "arm": "r15", "riscv64": "pc", "s390x": "pswa", "ppc64le": "nip",
    "loongarch64": "csr_era",
}  # fmt: skip
"""What each architecture calls the register with the address of the instruction."""
