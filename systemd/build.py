"""Compile the program that opens perf events for the daemon, systemd/opener.c, for this host.

Runs as `python systemd/build.py`, and through hatch_build.py when a wheel or an editable install is made. It is linked
statically, so that one wheel does for every C library. Without clang or a static C library nothing is compiled: only
kernels that give perf events to CAP_SYS_ADMIN alone, and have no other way, need it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().with_name("opener.c")
TARGET = SOURCE.with_name("stapsdtd-opener")


def build(target: Path = TARGET, *options: str) -> bool:
    """Return whether there is a program, which otherwise one line explains. options: further ones of clang's."""
    made = target.with_suffix(".new")
    if shutil.which("clang") is None:
        problem = "clang is missing (apt-get install clang)"
    else:
        done = subprocess.run(command(made, *options), check=False, capture_output=True, text=True)
        if not done.returncode:
            made.replace(target)
            return True
        problem = f"clang refused opener.c, which takes a static C library (libc6-dev): {_first_error(done.stderr)}"
    # one of another source
    target.unlink(missing_ok=True)
    print(f"stapsdtd: building without the opener of perf events: {problem}", file=sys.stderr)
    return False


def command(output: Path, *options: str) -> list[str]:
    return [
        "clang", "-O2", "-s", "-static", "-fstack-protector-strong", "-Wall", "-Wextra", "-Werror", *options,
        str(SOURCE), "-o", str(output),
    ]  # fmt: skip


def _first_error(stderr: str) -> str:
    lines = stderr.strip().splitlines() or [""]
    return next((line for line in lines if "error" in line), lines[0])


if __name__ == "__main__":
    build()
