"""Differences between architectures: the code of a stub, argument registers, the page size."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.provider.argtypes import ArgType


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    machine: ELF's e_machine.
    page_size: the largest page size that its kernels may use, in bytes.
    stub: the code of one probe: the nop that tools arm, then a return.
    registers: the six argument registers as notes spell them, by size in bytes.
    """

    machine: int
    page_size: int
    stub: bytes
    registers: Mapping[int, tuple[str, ...]]

    def operands(self, types: tuple[ArgType, ...]) -> str:
        """Return the note's argument string: `8@%rdi -4@%esi`."""
        return " ".join(
            f"{'-' if type_.signed else ''}{type_.size}@{self.registers[type_.size][position]}"
            for position, type_ in enumerate(types)
        )


X86_64 = Architecture(
    machine=62,
    page_size=0x1000,
    stub=bytes.fromhex("90 c3").ljust(16, b"\xcc"),
    registers={
        1: ("%dil", "%sil", "%dl", "%cl", "%r8b", "%r9b"),
        2: ("%di", "%si", "%dx", "%cx", "%r8w", "%r9w"),
        4: ("%edi", "%esi", "%edx", "%ecx", "%r8d", "%r9d"),
        8: ("%rdi", "%rsi", "%rdx", "%rcx", "%r8", "%r9"),
    },
)

AARCH64 = Architecture(
    machine=183,
    page_size=0x10000,
    stub=bytes.fromhex("1f2003d5 c0035fd6"),
    # Always x registers, as gcc emits for sdt.h too: libbpf does not support w registers.
    registers=dict.fromkeys((1, 2, 4, 8), ("x0", "x1", "x2", "x3", "x4", "x5")),
)

_BY_UNAME = {"x86_64": X86_64, "aarch64": AARCH64}


def of_this_process() -> Architecture:
    """Raises NotImplementedError on other architectures and systems, and in 32-bit Python."""
    host = os.uname()
    architecture = _BY_UNAME.get(host.machine)
    if host.sysname != "Linux" or sys.maxsize < 2**32 or architecture is None:
        raise NotImplementedError(
            f"probes need 64-bit Python on Linux, x86_64 or aarch64; this is {host.sysname} {host.machine}"
        )
    return architecture
