"""Compile the BPF programs into the package, for the architecture of this host.

    bpf/stapsdt.bpf.c   the program of the bpf engine, in stapsdtd/capture/bpf
    bpf/*.bpf.c         small ones of their own, each an object in stapsdtd/kernel/objects

Runs as `python bpf/build.py`, and through hatch_build.py when a wheel or an editable install is made. clang and the
headers of libbpf are needed here, and nowhere at run time. Without clang, or for a machine that the program does not
know, nothing is compiled: the ftrace engine does without.
"""

from __future__ import annotations

import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "bpf" / "stapsdt.bpf.c"
TARGET = ROOT / "stapsdtd" / "capture" / "bpf" / "stapsdt.bpf.o"
OBJECTS = ROOT / "stapsdtd" / "kernel" / "objects"
fingerprint = runpy.run_path(str(TARGET.with_name("fingerprint.py")))["fingerprint"]

ARCHITECTURES = {
    "x86_64": "x86", "aarch64": "arm64", "riscv64": "riscv", "s390x": "s390", "ppc64le": "powerpc",
    "loongarch64": "loongarch",
}  # fmt: skip


def build(target: Path = TARGET, source: Path = SOURCE, *options: str) -> bool:
    """Return whether there is an object, which otherwise one line explains. options: further ones of clang's."""
    machine = platform.machine()
    missing = ""
    if machine not in ARCHITECTURES:
        missing = f"bpf/stapsdt.bpf.c does not know {machine}"
    elif shutil.which("clang") is None:
        missing = "clang is missing (apt-get install clang libbpf-dev)"
    if missing:
        # one of another source, or of another machine
        target.unlink(missing_ok=True)
        print(f"stapsdtd: building without the bpf engine: {missing}; the ftrace engine works without", file=sys.stderr)
        return False
    # where Debian and Ubuntu keep asm/types.h, which clang does not look for when it compiles for bpf
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{machine}-linux-gnu"
    made = target.with_suffix(".new")
    done = subprocess.run(command(machine, f"/usr/include/{multiarch}", made, source, *options), check=False)
    if done.returncode:
        sys.exit(f"clang refused {source.name}; its message stands above (libbpf-dev has the headers it needs)")
    made.replace(target)
    return True


def command(machine: str, headers: str, output: Path, source: Path = SOURCE, *options: str) -> list[str]:
    """headers: where that machine's asm/types.h is."""
    return [
        "clang", "-g", "-O2", "-Wall", "-Wextra", "-Werror", "-target", "bpfeb" if machine == "s390x" else "bpfel",
        "-mcpu=v3", f"-D__TARGET_ARCH_{ARCHITECTURES[machine]}", f"-DFINGERPRINT={fingerprint():#x}ULL", f"-I{headers}",
        f"-I{SOURCE.parent}",
        *options, "-c", str(source), "-o", str(output),
    ]  # fmt: skip


def build_all() -> bool:
    """Compile every program. Return what `build` does."""
    if not build():
        return False
    OBJECTS.mkdir(exist_ok=True)
    return all(
        build(OBJECTS / f"{source.stem}.o", source) for source in SOURCE.parent.glob("*.bpf.c") if source != SOURCE
    )


if __name__ == "__main__":
    build_all()
