"""All architectures, by name."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from stapsdtd.arch.aarch64 import AARCH64
from stapsdtd.arch.arm import ARM
from stapsdtd.arch.i386 import I386
from stapsdtd.arch.loongarch64 import LOONGARCH64
from stapsdtd.arch.ppc64le import PPC64, PPC64LE
from stapsdtd.arch.record import Architecture
from stapsdtd.arch.riscv64 import RISCV64
from stapsdtd.arch.s390x import S390X
from stapsdtd.arch.x86_64 import X32, X86_64

ARCHITECTURES: Mapping[str, Architecture] = {
    each.name: each for each in (X86_64, X32, I386, AARCH64, ARM, RISCV64, S390X, PPC64LE, PPC64, LOONGARCH64)
}


def word_bytes(architecture: str) -> int:
    """Return the size of a register and of a pointer; 8 if the architecture is unknown."""
    known = ARCHITECTURES.get(architecture)
    return known.word_bytes if known else 8


def of_host(machine: str | None = None) -> Architecture | None:
    """Return the architecture of a host's kernel. machine: as printed by `uname -m`, and this host's by default."""
    machine = machine or platform.machine()
    return next((each for each in ARCHITECTURES.values() if each.machine == machine), None)


def why_foreign(architecture: str, machine: str | None = None) -> str | None:
    """Return why sites of an object with this architecture must not be armed; None if its code runs here.

    To an emulator, foreign code is data, which a breakpoint would corrupt. machine: as printed by `uname -m`, and this
    host's by default.
    """
    machine = machine or platform.machine()
    known = ARCHITECTURES.get(architecture)
    if known is not None and known.machine == machine:
        return None
    return f"the object's code is for {architecture}, and this host is {machine}"
