"""How long the daemon waits for a file that is parsed in the sandbox, and what such a process takes."""

from __future__ import annotations

import glob
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from stapsdtd.elf import parse_object
from stapsdtd.sandbox.parser import SandboxedParser
from tests.bench.report import Figure, median_ratio
from tests.bench.setup import Setup
from tests.support import children
from tests.unit.test_elf_hostile import many_notes

NOTES = 400_000
_PROGRAMS = (
    ("libc.so.6, no probes", "/usr/lib/*/libc.so.6", 3e-3),
    ("libstdc++.so.6, 3 sites", "/usr/lib/*/libstdc++.so.6", 3e-3),
    ("libjvm.so, hundreds of sites", "/usr/lib/jvm/java-*-openjdk-*/lib/server/libjvm.so", 40e-3),
)
_GOAL_NOTES_SECONDS, _GOAL_MIB = 5.0, 300


def run(setup: Setup) -> list[Figure]:
    begin = time.perf_counter()
    with closing(SandboxedParser()) as sandbox:
        _parse(sandbox, sys.executable)
        start = time.perf_counter() - begin
        figures = [Figure("sandbox starts and parses", start, "s")]
        for what, pattern, most in _PROGRAMS:
            found = glob.glob(pattern)
            if not found:
                print(f"bench: no {pattern}, so it is left out", file=sys.stderr)
                continue
            figures.append(_figure(f"sandbox, {what}", _measure(setup, sandbox, found[-1]), most))
        shared = setup.folder / "shared"
        shared.write_bytes(Path(sys.executable).read_bytes())
        shared.chmod(0o666)
        own = median(_measure(setup, sandbox, str(shared))[0])
        figures.append(Figure("sandbox, a file that gets a worker of its own", own, "s"))
    return figures + _many_notes(setup)


def _many_notes(setup: Setup) -> list[Figure]:
    path = setup.folder / "many"
    path.write_bytes(many_notes(NOTES).build())
    before = children()
    # the worker is kept, however long it takes, so that its memory can be looked at afterwards
    with closing(SandboxedParser(slow_seconds=math.inf)) as sandbox:
        figure = _figure(f"sandbox, {NOTES:,} notes", _measure(setup, sandbox, str(path), 1), _GOAL_NOTES_SECONDS)
        (zygote,) = children() - before
        peak = max(map(_peak_kib, children(zygote))) / 1024
    goal = f"<= {_GOAL_MIB} MiB"
    return [figure, Figure("its worker's memory, at most", peak, "MiB", None, goal, peak <= _GOAL_MIB)]


def _figure(name: str, seconds: tuple[list[float], list[float]], most: float) -> Figure:
    ours = median(seconds[0])
    goal = f"<= {most:g} s" if most >= 1 else f"<= {most * 1e3:g} ms"
    return Figure(name, ours, "s", median_ratio(*seconds), goal, ours <= most, "to parsing within the daemon")


def _measure(setup: Setup, sandbox: SandboxedParser, path: str, times: int = 20) -> tuple[list[float], list[float]]:
    """Seconds in the sandbox and in this process, in turns."""
    sandboxed: list[float] = []
    unprotected: list[float] = []
    for _ in range(setup.repeats * times):
        with _timed(sandboxed):
            _parse(sandbox, path)
        with _timed(unprotected), open(path, "rb") as file:
            parse_object(file)
    return sandboxed, unprotected


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    into.append(time.perf_counter() - begin)


def _parse(sandbox: SandboxedParser, path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sandbox.parse(descriptor, os.getpid())
    finally:
        os.close(descriptor)


def _peak_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text(encoding="ascii").split("VmHWM:")[1].split()[0])
