"""Which architectures' objects run on this host."""

from __future__ import annotations

import platform

_RUNS = {
    "x86_64": ("x86-64", "i386", "x32"), "aarch64": ("aarch64", "arm"), "riscv64": ("riscv64",), "s390x": ("s390x",),
    "ppc64le": ("ppc64le",), "loongarch64": ("loongarch64",),
}  # fmt: skip
"""By uname's name of the machine."""


def why_foreign(architecture: str) -> str | None:
    """Answer why a site of an object is not to be armed; None where its code runs here.

    An emulator reads foreign code as data, which a breakpoint of this machine would spoil.
    """
    machine = platform.machine()
    if architecture in _RUNS.get(machine, ()):
        return None
    return f"the object's code is for {architecture}, and this host is {machine}"
