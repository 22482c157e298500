"""docs/kernels.md: what each kernel offers, as `stapsdt doctor` says there, which tests passed on it, and what users of
Debian get from the installed service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support import ROOT

_HEAD = """\
# Kernels

`./dev test --vm --table` writes this table: it boots Debian's kernels under qemu and runs the tests marked `vm` on
each, with both engines. CI does the same for every change. The rows are the findings of `stapsdt doctor` on that
kernel. The last column is the host on which the table was written, where all tests run.

"""
_TAIL = """
- **Kernels before 6.1 are untested.** Semaphores need 4.20 and the bpf engine 6.0; run `stapsdt doctor` there.
- **Any other kernel** that apt has a package of can be tested by name: `./dev test --vm 6.12` takes the newest of a
  series, `./dev test --vm linux-image-6.1.0-49-amd64` that package, and `6.12:arm64` aarch64, where only the bpf engine
  is tested, with part of the tests.
- Guests run emulated instructions on two CPUs, ten times slower than the host. Tests of speed, of load, and of programs
  that are slow to start therefore run only on the host's kernel.
"""
_INSTALLED_TITLE = "## Installed on Debian\n"
_INSTALLED_HEAD = f"""\
{_INSTALLED_TITLE}
`./dev test --installed --table` writes this table: it installs stapsdtd with `./dev install` into Debian, boots that
with systemd under qemu, with default settings of the kernel, and runs the tests marked `installed` against the service,
as root and as an ordinary user. CI does the same for every change. Each row below the systems' own is a test.

"""
MISSING = "**no**"


@dataclass(frozen=True, slots=True)
class Check:
    """One of doctor's."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Column:
    """kernel: its version; tests: what they came to."""

    kernel: str
    machine: str
    checks: tuple[Check, ...]
    tests: str


@dataclass(frozen=True, slots=True)
class InstalledColumn:
    """facts: by what they are of. results: `yes`, MISSING or `skipped`, by the test's name as junit has it."""

    system: str
    facts: Mapping[str, str]
    results: Mapping[str, str]


def checks(doctor: str) -> tuple[Check, ...]:
    """Read doctor's JSON lines. The server's is left out: it is about a process, not about the kernel."""
    found = map(json.loads, doctor.splitlines())
    return tuple(Check(each["name"], each["available"], each["detail"]) for each in found if each["name"] != "server")


def document(columns: Sequence[Column]) -> str:
    names = list(dict.fromkeys(check.name for column in columns for check in column.checks))
    rows = [
        ["", *(f"{column.kernel}, {column.machine}" for column in columns)],
        ["---"] * (len(columns) + 1),
        *([name, *(_cell(column, name) for column in columns)] for name in names),
        ["engine that `auto` takes", *map(_engine, columns)],
        ["tests", *(column.tests for column in columns)],
    ]
    refused = [
        f"- {column.kernel}, {column.machine}, {check.name}: {check.detail}"
        for column in columns
        for check in column.checks
        if not check.available
    ]
    return _HEAD + _lines(rows) + "".join(f"\n{line}" for line in refused) + ("\n" * bool(refused)) + _TAIL


def installed(columns: Sequence[InstalledColumn]) -> str:
    facts = dict.fromkeys(name for column in columns for name in column.facts)
    tests = dict.fromkeys(name for column in columns for name in column.results)
    rows = [
        ["", *(column.system for column in columns)],
        ["---"] * (len(columns) + 1),
        *([name, *(column.facts.get(name, "") for column in columns)] for name in facts),
        *([_spoken(name), *(column.results.get(name, "") for column in columns)] for name in tests),
    ]
    return _INSTALLED_HEAD + _lines(rows)


def _spoken(test: str) -> str:
    """Turn `test_own_programs::test_by_pid` into words."""
    module, _, name = test.partition("::")
    return f"{module.removeprefix('test_')}: {name.removeprefix('test_')}".replace("_", " ")


def write(kernels: str = "", installed: str = "") -> None:
    """Write the given parts anew, and leave the other as it is."""
    path = ROOT / "docs" / "kernels.md"
    old_kernels, _, old_installed = path.read_text().partition(_INSTALLED_TITLE)
    kernels = kernels or old_kernels
    installed = installed or (old_installed and _INSTALLED_TITLE + old_installed)
    path.write_text("\n\n".join(part.rstrip("\n") for part in (kernels, installed) if part) + "\n")


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _cell(column: Column, name: str) -> str:
    found = [check.available for check in column.checks if check.name == name]
    if not found:
        return ""
    return "yes" if found[0] else MISSING


def _engine(column: Column) -> str:
    available = {check.name for check in column.checks if check.available}
    return "bpf" if "bpf programs" in available else "ftrace"
