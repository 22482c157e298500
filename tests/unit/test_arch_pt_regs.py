"""The tables of registers against the kernel's headers, and the program for each machine that it knows."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from stapsdtd.arch import ARCHITECTURES
from tests.support import ROOT, require

BUILD = runpy.run_path(str(ROOT / "bpf" / "build.py"))


def fields(architecture: str) -> tuple[str, Mapping[str, str]]:
    """The structure of asm/ptrace.h, and the names that differ there."""
    match architecture:
        case "aarch64":
            return "struct user_pt_regs", {f"x{number}": f"regs[{number}]" for number in range(31)}
        case "riscv64":
            return "struct user_regs_struct", {}
        case "s390x":
            named = {f"r{number}": f"gprs[{number}]" for number in range(16)}
            return "user_pt_regs", named | {"pswm": "psw.mask", "pswa": "psw.addr"}
        case "ppc64le":
            return "struct pt_regs", {f"r{number}": f"gpr[{number}]" for number in range(32)}
        case _:
            return "struct pt_regs", {}


@pytest.mark.parametrize(
    ("architecture", "compiler"),
    [
        ("x86-64", "gcc"),
        ("aarch64", "aarch64-linux-gnu-gcc"),
        ("riscv64", "riscv64-linux-gnu-gcc"),
        ("s390x", "s390x-linux-gnu-gcc"),
        ("ppc64le", "powerpc64le-linux-gnu-gcc"),
    ],
)
def test_registers_are_where_the_kernels_header_has_them(architecture: str, compiler: str, tmp_path: Path) -> None:
    require(shutil.which(compiler), compiler)
    structure, names = fields(architecture)
    checks = "\n".join(
        f'_Static_assert(offsetof({structure}, {names.get(name, name)}) == {place} * sizeof(long), "{name}");'
        for name, place in ARCHITECTURES[architecture].pt_regs.items()
    )
    source = tmp_path / "offsets.c"
    source.write_text(f"#include <stddef.h>\n#include <asm/ptrace.h>\n{checks}\n")
    subprocess.run([compiler, "-fsyntax-only", str(source)], check=True)


@pytest.mark.parametrize(
    ("machine", "headers"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu"),
        ("aarch64", "/usr/aarch64-linux-gnu/include"),
        ("riscv64", "/usr/riscv64-linux-gnu/include"),
        ("s390x", "/usr/s390x-linux-gnu/include"),
        ("ppc64le", "/usr/powerpc64le-linux-gnu/include"),
        # Debian 12 has none of its own, and the types are those of any 64-bit machine
        ("loongarch64", "/usr/riscv64-linux-gnu/include"),
    ],
)
def test_program_compiles_for_each_machine(machine: str, headers: str, tmp_path: Path) -> None:
    require(Path(headers).is_dir(), headers)
    made = tmp_path / "program.o"
    subprocess.run(BUILD["command"](machine, headers, made), check=True)
    assert made.stat().st_size > 0


def test_32_bit_processes_have_the_hosts_registers() -> None:
    whole, narrow = ARCHITECTURES["x86-64"].pt_regs, ARCHITECTURES["i386"].pt_regs
    assert {name: whole[f"r{name[1:]}"] for name in narrow} == narrow
    assert set(ARCHITECTURES["arm"].pt_regs.values()) == {*range(15), ARCHITECTURES["aarch64"].pt_regs["pc"]}
