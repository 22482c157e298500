"""`./dev test --vm [--table] [NAME…]`: the tests that are marked `vm`, on other kernels."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree.ElementTree import ParseError

from tests.support import ROOT, stapsdt
from tests.vm import guest, initrd, machines, report, table
from tests.vm.guest import Machine
from tests.vm.kernels import LOGS, KernelUnavailableError
from tests.vm.report import Report
from tests.vm.table import Check, Column

DEFAULT = ("6.1", "6.12", "6.12:arm64")
_SECONDS = 2100
"""When a kernel has gone down without saying so; a quarter of an hour is usual, and twice that on a busy host."""
_TEST_SECONDS = 300
_MAX_FAILURES = 8
"""A kernel that refuses an engine fails most tests, each of which takes long then."""
_CONSOLE_LINES = 25

_FETCHING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Outcome:
    """name: as asked for; machine, release: what was found. problem: why it cannot count as fine,
    whatever its tests say; is_skipped: there is no such kernel, and that is no failure.
    """

    name: str
    log: Path
    seconds: float = 0
    machine: Machine | None = None
    release: str = ""
    report: Report = field(default_factory=Report)
    checks: tuple[Check, ...] = ()
    problem: str = ""
    is_skipped: bool = False

    @property
    def is_fine(self) -> bool:
        return self.is_skipped or (not self.problem and bool(self.report.passed) and not self.report.failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev test --vm")
    parser.add_argument("--table", action="store_true", help="write docs/kernels.md from what is found")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a series, or a package ({' '.join(DEFAULT)})")
    options = parser.parse_args()
    names = options.names or DEFAULT
    LOGS.mkdir(parents=True, exist_ok=True)
    print(f"vm: Linux {', '.join(names)}; consoles in {LOGS.relative_to(ROOT)}/", flush=True)
    # each has two CPUs and uses little more than one
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        outcomes = []
        for outcome in pool.map(_outcome, names):
            outcomes.append(outcome)
            print(section(outcome), flush=True)
    if options.table:
        table.write(kernels=table.document([*map(_column, outcomes), _own_column()]))
    return 0 if all(outcome.is_fine for outcome in outcomes) else 1


def _outcome(name: str) -> Outcome:
    log = LOGS / f"{name}.log"
    try:
        # apt does one thing at a time
        with _FETCHING:
            machine = machines.find(name)
    except KernelUnavailableError as error:
        return Outcome(name, log, problem=str(error), is_skipped=os.environ.get("STAPSDTD_REQUIRE_KERNEL") != "1")
    began = time.monotonic()
    problem, status = "", 0
    with tempfile.TemporaryDirectory() as folder, open(log, "w", encoding="utf-8", buffering=1) as console:
        share = Path(folder)
        command = ["/bin/sh", "-c", _script(machine)]
        try:
            status = guest.run(
                machine, command, share, seconds=_SECONDS, environment=_passed_on(), output=console.write
            )
        except guest.GuestError as error:
            problem = str(error)
        found = Report()
        try:
            found = report.read(share / "junit.xml")
        except (FileNotFoundError, ParseError) as error:
            problem = problem or f"pytest left no report ({error})"
        if status and not found.failed:
            problem = problem or f"pytest ended with {status}"
        return Outcome(
            name, log, time.monotonic() - began, machine, _text(share / "release").strip(), found,
            table.checks(_text(share / "doctor")), problem,
        )  # fmt: skip


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _script(machine: Machine) -> str:
    doctor = f"{machine.commands}/stapsdt --server unix:{initrd.SHARE}/none doctor --json"
    pytest = (
        f"{machine.commands}/python -m pytest -v --color=no -p no:cacheprovider -m vm --timeout {_TEST_SECONDS}"
        f" --maxfail {_MAX_FAILURES} --junitxml {initrd.SHARE}/junit.xml {_tests(machine)}"
    )
    return f"{doctor} >{initrd.SHARE}/doctor; uname -r >{initrd.SHARE}/release; exec {pytest}"


def _tests(machine: Machine) -> str:
    if machine.architecture != "x86-64":
        # a smoke run: there is no compiler in the guest, nor bpftrace
        wanted = "(bpf or fentry or kprobe) and not test_what_kprobes_skip_is_told"
        return f"tests/kernel/test_capture.py tests/kernel/test_function_ways.py -k '{wanted}'"
    # the others take as long to import as a test takes
    files = sorted(ROOT.glob("tests/kernel/test_*.py"))
    return " ".join(str(path.relative_to(ROOT)) for path in files if "mark.vm" in path.read_text())


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name == "STAPSDTD_REQUIRE_KERNEL"}


def section(outcome: Outcome) -> str:
    """Return what is printed of a kernel: one line where all is well, else each failure too."""
    if outcome.is_skipped:
        return f"vm: Linux {outcome.name}: skipped, {outcome.problem}"
    lines = []
    if outcome.machine:
        package = outcome.machine.kernel.package
        lines = [f"vm: Linux {outcome.name} ({package}): {outcome.report} in {outcome.seconds:.0f} s"]
    for name, text in outcome.report.failed:
        lines += [f"____ {name} on Linux {outcome.name} ____", text]
    if outcome.problem:
        lines.append(f"vm: Linux {outcome.name}: {outcome.problem}")
        if outcome.machine:
            lines += ["its console ended so:", *_text(outcome.log).splitlines()[-_CONSOLE_LINES:]]
    return "\n".join(lines)


def _column(outcome: Outcome) -> Column:
    tests = str(outcome.report)
    if outcome.report.failed:
        tests += ": " + ", ".join(sorted({name for name, _ in outcome.report.failed}))
    architecture = outcome.machine.architecture if outcome.machine else ""
    return Column(
        outcome.release or outcome.name, architecture, outcome.checks, "; ".join(filter(None, [tests, outcome.problem]))
    )


def _own_column() -> Column:
    with tempfile.TemporaryDirectory() as folder:
        doctor = stapsdt(f"unix:{folder}/none", "doctor", "--json", check=False).stdout
    release, machine = platform.release(), platform.machine().replace("_", "-")
    return Column(release.partition("-")[0], machine, table.checks(doctor), "all, by `./dev test`")


if __name__ == "__main__":
    sys.exit(main())
