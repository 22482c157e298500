"""Compile bpf/stapsdt.bpf.c into the package, for the architecture of this host.

Runs as `python bpf/build.py`, and through hatch_build.py when a wheel or an editable install is made. clang and the
headers of libbpf are needed here, and nowhere at run time.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "bpf" / "stapsdt.bpf.c"
TARGET = ROOT / "stapsdtd" / "capture" / "bpf" / "stapsdt.bpf.o"

_ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64", "riscv64": "riscv"}


def build() -> None:
    machine = platform.machine()
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        print(f"bpf/build.py: {machine} is not known to bpf/stapsdt.bpf.c; the ftrace engine does without")
        return
    # where Debian and Ubuntu keep asm/types.h, which clang does not look for when it compiles for bpf
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{machine}-linux-gnu"
    made = TARGET.with_suffix(".new")
    command = [
        "clang", "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-target", "bpf", "-mcpu=v3",
        f"-D__TARGET_ARCH_{architecture}", f"-I/usr/include/{multiarch}",
        "-c", str(SOURCE), "-o", str(made),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, check=False)
    except FileNotFoundError:
        sys.exit("bpf/build.py: clang is missing; apt-get install clang libbpf-dev")
    if done.returncode:
        sys.exit("clang refused bpf/stapsdt.bpf.c; its message stands above")
    made.replace(TARGET)


if __name__ == "__main__":
    build()
