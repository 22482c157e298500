"""Which machine a name means: `6.12`, `linux-image-6.1.0-49-amd64`, `6.12:arm64`."""

from __future__ import annotations

from pathlib import Path

from tests.support import COMMANDS
from tests.vm import aarch64, kernels
from tests.vm.guest import Machine

_ARM64 = ":arm64"
"""As apt writes it."""

X86_64 = ("qemu-system-x86_64", "-cpu", "max,avx2=off")
"""With what qemu 7.2 makes of AVX2, numpy's argsort() of a few dozen numbers is wrong."""


def find(name: str) -> Machine:
    """Raises KernelUnavailableError."""
    if name.endswith(_ARM64):
        return aarch64.machine(name.removesuffix(_ARM64))
    return Machine("x86-64", kernels.find(name), X86_64, "ttyS0", Path("/"), Path("/bin/busybox"), str(COMMANDS))
