"""Know which architectures' code this host runs natively."""

from __future__ import annotations

import platform

_NATIVE = {
    "x86_64": ("x86-64", "i386", "x32"), "aarch64": ("aarch64", "arm"), "riscv64": ("riscv64",), "s390x": ("s390x",),
    "ppc64le": ("ppc64le",), "loongarch64": ("loongarch64",),
}  # fmt: skip
"""By machine name as printed by `uname -m`."""


def why_foreign(architecture: str) -> str | None:
    """Return why sites of an object with this architecture must not be armed; None if its code runs here.

    To an emulator, foreign code is data, which a breakpoint would corrupt.
    """
    machine = platform.machine()
    if architecture in _NATIVE.get(machine, ()):
        return None
    return f"the object's code is for {architecture}, and this host is {machine}"
