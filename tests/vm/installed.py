"""`./dev test --installed [12|13]… [--table] [ARG…]`: the tests that are marked `installed`, against the service.

Each system boots under qemu with systemd as PID 1, and pytest runs there as root, from an environment of its own.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.etree.ElementTree import ParseError

from tests.support import ROOT
from tests.vm import guest, images, initrd, machines, report, table
from tests.vm.images import SYSTEMS, Image, ImageError, System
from tests.vm.kernels import LOGS
from tests.vm.report import Report

_SECONDS = 2400
"""When a guest has hung; half of it is usual where two run at once on two CPUs."""
_TEST_SECONDS = 600
_SILENT_SECONDS = 750
"""A test that takes too long says so before; the emulated machine itself has stopped then, which was seen once."""
_BOOTS = 2
_MEMORY_MIB = 3000
_LINES = 25
_SYSTEMD = "systemd.show_status=0 systemd.default_timeout_start_sec=900 SYSTEMD_LOG_SECCOMP=1"
"""For systemd, on the kernel's command line: emulated services start slowly, and each system call that a unit's filter
denies is logged.
"""
_TESTS = "/run/tests"
"""Where the guest has tests/, or what of it runs there, apart from the tree that is installed."""
_FILES = ("__init__.py", "conftest.py", "connector.py", "semaphores.py", "waiting.py", "installed", "targets")
_FACTS = {
    "Linux": "uname -r",
    "systemd": "systemctl --version | head -n 1 | cut -d' ' -f2",
    "Python": "python3 -c 'import platform; print(platform.python_version())'",
    "`kernel.perf_event_paranoid`": "cat /proc/sys/kernel/perf_event_paranoid",
    "engine that `auto` takes": "systemctl start stapsdtd && stapsdt info | sed -n 's/^engine *//p'",
}
"""What a column of the table says of a system, and the command that finds it out there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """facts: what the commands of _FACTS printed. problem: why it cannot count as fine, whatever its tests say."""

    system: System
    log: Path
    seconds: float = 0
    facts: tuple[str, ...] = ()
    report: Report = field(default_factory=Report)
    problem: str = ""

    @property
    def is_fine(self) -> bool:
        return not self.problem and bool(self.report.passed) and not self.report.failed


def main() -> int:
    names, is_table, arguments = parsed(sys.argv[1:])
    if platform.machine() != "x86_64":
        print("installed: the systems are x86-64, as this host is not", file=sys.stderr)
        return 1
    LOGS.mkdir(parents=True, exist_ok=True)
    print(f"installed: Debian {', '.join(names)}; consoles in {LOGS.relative_to(ROOT)}/", flush=True)
    # one alone is watched while it runs; of several, the failures are shown at the end of each
    shown = partial(print, end="", flush=True) if len(names) == 1 else None
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        outcomes = []
        for outcome in pool.map(lambda name: _outcome(SYSTEMS[name], arguments, shown), names):
            outcomes.append(outcome)
            print(section(outcome), flush=True)
    if is_table:
        table.write(installed=table.installed(list(map(_column, outcomes))))
    return 0 if all(outcome.is_fine for outcome in outcomes) else 1


def parsed(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Return the systems, whether --table is asked for, and what pytest is to get: all from the first other word on."""
    names, is_table, rest = [], False, list(arguments)
    while rest and (rest[0] in SYSTEMS or rest[0] == "--table"):
        word = rest.pop(0)
        is_table = is_table or word == "--table"
        if word in SYSTEMS:
            names.append(word)
    return names or list(SYSTEMS), is_table, rest


def _outcome(system: System, arguments: Sequence[str], shown: Callable[[str], object] | None) -> Outcome:
    log = LOGS / f"debian{system.name}.log"
    try:
        image = images.find(system)
    except ImageError as error:
        return Outcome(system, log, problem=str(error))
    for _ in range(_BOOTS - 1):
        try:
            return _booted(system, image, log, arguments, shown)
        except guest.GuestHungError as error:
            print(f"installed: Debian {system.name}: {error}; it boots once more", flush=True)
    try:
        return _booted(system, image, log, arguments, shown)
    except guest.GuestHungError as error:
        return Outcome(system, log, problem=str(error))


def _booted(
    system: System, image: Image, log: Path, arguments: Sequence[str], shown: Callable[[str], object] | None
) -> Outcome:
    """Raises GuestHungError."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(log, "w", encoding="utf-8", buffering=1) as console:
        share = Path(folder)
        _provide(share, arguments)

        def write(line: str) -> None:
            console.write(line)
            if shown:
                shown(line)

        problem, status = "", 0
        try:
            guest.boot(_command_line(image, share, log.with_suffix(".console")), _SECONDS, write, _SILENT_SECONDS)
            status = guest.exit_status(share)
        except guest.GuestHungError:
            raise
        except guest.GuestError as error:
            problem = str(error)
        found = Report()
        try:
            found = report.read(share / "junit.xml")
        except (FileNotFoundError, ParseError) as error:
            problem = problem or f"pytest left no report ({error})"
        if status and not found.failed:
            problem = problem or f"pytest ended with {status}"
        facts = tuple(_text(share / f"fact{number}").strip() for number in range(len(_FACTS)))
        _keep_journal(share, log)
        return Outcome(system, log, time.monotonic() - began, facts, found, problem)


def _provide(share: Path, arguments: Sequence[str]) -> None:
    """Put what the guest runs into the folder that it shares."""
    tests = share / "tests"
    tests.mkdir()
    for name in _FILES:
        copy = shutil.copytree if (ROOT / "tests" / name).is_dir() else shutil.copy
        copy(ROOT / "tests" / name, tests / name)
    shutil.copy(ROOT / "pyproject.toml", share)
    (share / "command").write_text(_script(arguments))


def _script(arguments: Sequence[str]) -> str:
    required = os.environ.get("STAPSDTD_REQUIRE_KERNEL", "")
    pytest = shlex.join([
        f"{images.ENVIRONMENT}/bin/python3", "-m", "pytest", "-m", "installed", "-v", "--no-summary", "--color=no",
        "-p", "no:cacheprovider", "--timeout", str(_TEST_SECONDS), "--junitxml", f"{initrd.SHARE}/junit.xml",
        "tests/installed", *arguments,
    ])  # fmt: skip
    lines = [
        "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1",
        f"export STAPSDTD_TIME_FACTOR={guest.TIME_FACTOR} STAPSDTD_REQUIRE_KERNEL={required}",
        # the tests' own process, which streams, starts others in between: gRPC's handlers of forks crashed there
        "export GRPC_ENABLE_FORK_SUPPORT=0",
        f"export STAPSDTD_TREE={images.TREE} PIP_NO_INDEX=1 PIP_FIND_LINKS={images.WHEELS}",
        f"mkdir {_TESTS}",
        f"cp -r {initrd.SHARE}/tests {initrd.SHARE}/pyproject.toml {_TESTS}",
        f"cd {_TESTS}",
        *(f"({command}) >{initrd.SHARE}/fact{number}" for number, command in enumerate(_FACTS.values())),
        pytest,
        "status=$?",
        f"journalctl --no-pager -b >{initrd.SHARE}/journal",
        "exit $status",
    ]
    return "\n".join(lines) + "\n"


def _command_line(image: Image, share: Path, console: Path) -> list[str]:
    return [
        *guest.emulator(machines.X86_64, cpus=2, memory_mib=_MEMORY_MIB),
        "-serial", f"file:{console}", "-serial", "stdio",
        "-kernel", str(image.kernel), "-initrd", str(image.initrd),
        "-append", f"root=/dev/vda rw console=ttyS0 panic=-1 quiet {_SYSTEMD}",
        # what the guest writes is gone when it ends
        "-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on",
        *guest.shared(share),
    ]  # fmt: skip


def _keep_journal(share: Path, log: Path) -> None:
    if (share / "journal").exists():
        shutil.copy(share / "journal", log.with_suffix(".journal"))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def section(outcome: Outcome) -> str:
    """Return what is printed of a system: one line where all is well, else each failure too."""
    name = f"Debian {outcome.system.name}"
    lines = [f"installed: {name}: {outcome.report} in {outcome.seconds:.0f} s"]
    for test, text in outcome.report.failed:
        lines += [f"____ {test} on {name} ____", text]
    lines += [f"installed: {name}: {test} skipped: {text}" for test, text in outcome.report.skipped]
    if outcome.problem:
        lines.append(f"installed: {name}: {outcome.problem}")
        if outcome.log.exists():
            lines += ["its output ended so:", *_text(outcome.log).splitlines()[-_LINES:]]
    return "\n".join(lines)


def _column(outcome: Outcome) -> table.InstalledColumn:
    results = dict.fromkeys(outcome.report.passed, "yes")
    results |= {test: "skipped" for test, _ in outcome.report.skipped}
    results |= {test: table.MISSING for test, _ in outcome.report.failed}
    facts = dict(zip(_FACTS, outcome.facts, strict=False))
    return table.InstalledColumn(f"Debian {outcome.system.name}", facts, results)


if __name__ == "__main__":
    sys.exit(main())
