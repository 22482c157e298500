"""Other tracers of the program that fires, for comparison."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from stapsdtd.kernel.tracefs import Tracefs
from tests.bench.setup import Firing
from tests.support import wait_for


class Traced(Protocol):
    """A program with probes."""

    @property
    def is_armed(self) -> bool: ...


Tracer = Callable[[Firing], AbstractContextManager[None]]

COUNT = "bpftrace { @ = count(); }"
PRINTF = "bpftrace { printf(…); }"
RECORD = "perf record"


def tracers() -> dict[str, Tracer]:
    """Those that this host has, by the names above."""
    known: dict[str, Tracer] = {COUNT: _bpftrace_count, PRINTF: _bpftrace_printf, RECORD: _perf_record}
    return {name: tracer for name, tracer in known.items() if shutil.which(name.split()[0])}


def missing() -> list[str]:
    """What this host would need for all of `tracers`."""
    return [command for command in ("bpftrace", "perf") if not shutil.which(command)]


def _bpftrace_count(firing: Firing) -> AbstractContextManager[None]:
    return bpftrace(firing, "{ @ = count(); }")


def _bpftrace_printf(firing: Firing) -> AbstractContextManager[None]:
    return bpftrace(firing, r'{ printf("%lu %d %d\n", arg0, arg1, arg2); }')


def bpftrace(firing: Firing, clause: str) -> AbstractContextManager[None]:
    """Run a clause of bpftrace's at the program's only site, in all processes."""
    return running(firing, "bpftrace", "-e", f"usdt:{firing.path}:firing:hit {clause}")


@contextmanager
def _perf_record(firing: Firing) -> Iterator[None]:
    """On an event of our own: `perf probe` would keep copies of the program in the user's home."""
    tracefs = Tracefs.locate()
    event = f"bench_{os.getpid()}/hit"
    data = firing.path.parent / "perf.data"
    arguments = "number=%di:u64 negative=%si:s32 thread=%dx:s32"
    tracefs.append_definition(f"p:{event} {firing.path}:{firing.site_offset:#x} {arguments}")
    try:
        name = event.replace("/", ":")
        with running(firing, "perf", "record", "-q", "-e", name, "-p", str(firing.pid), "-o", str(data)):
            yield
    finally:
        tracefs.append_definition(f"-:{event}")
        data.unlink(missing_ok=True)


@contextmanager
def running(traced: Traced, *command: str | Path) -> Iterator[None]:
    """Run a tracer that attaches to a program."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: traced.is_armed, f"{command[0]} to attach")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        wait_for(lambda: not traced.is_armed, f"{command[0]} to detach")
