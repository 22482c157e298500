"""What the benchmarks work with: how much of it, the program that fires, clients in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from stapsdtd.elf import parse_object
from tests.bench.consumer import Consumed
from tests.support import COMMANDS, ROOT, Daemon, compile_target, mapped_bytes, running_daemon

SELECTOR = "firing:hit"
BUFFER_KIB = 65536  # of the kernel's, for each CPU: what a burst waits in while the daemon has no CPU to run on
BREAKPOINT = b"\xcc"


@dataclass(frozen=True, slots=True)
class Setup:
    """folder is the benchmark's own; quick asks for as little work as still makes sense."""

    folder: Path
    repeats: int
    engine: str
    quick: bool

    @contextmanager
    def daemon(self, commands: Path = COMMANDS, prefix: Sequence[str] = ()) -> Iterator[Daemon]:
        """commands: where it is installed. prefix: a command that runs it."""
        with running_daemon(self.folder, "--engine", self.engine, commands=commands, prefix=prefix) as daemon:
            yield daemon


@dataclass(frozen=True, slots=True)
class Fired:
    """What the program says of itself: see tests/targets/firing.c."""

    fired: int
    begin_ns: int
    wall_ns: int
    cpu_ns: int

    @property
    def seconds_a_hit(self) -> float:
        """CPU time that the program spent for a hit."""
        return self.cpu_ns / self.fired / 1e9

    @property
    def rate(self) -> float:
        """Hits a second."""
        return self.fired / self.wall_ns * 1e9


class Firing:
    """A running tests/targets/firing.c. texts: how many strings its second argument is in turn; 0: it is a number."""

    def __init__(self, folder: Path, texts: int = 0) -> None:
        flags = [f"-DTEXTS={texts}"] if texts else []
        self.path = compile_target("firing.c", folder / ("firing_texts" if texts else "firing"), *flags, "-lpthread")
        with open(self.path, "rb") as file:
            (site,) = parse_object(file).sites
        self.site_offset = site.site_offset
        self._process = subprocess.Popen([self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def fire(self, count: int = 0, *, seconds: float = 0, rate: int = 0, threads: int = 1) -> Fired:
        """Fire count times or for seconds, in each thread, and wait until that is done."""
        self.begin(count, seconds=seconds, rate=rate, threads=threads)
        return Fired(**json.loads(_read(self._process.stdout)))

    def begin(self, count: int = 0, *, seconds: float = 0, rate: int = 0, threads: int = 1) -> None:
        """The same without waiting."""
        _write(self._process.stdin, f"{count} {seconds} {rate} {threads}")

    @property
    def is_armed(self) -> bool:
        return mapped_bytes(self.pid, str(self.path), self.site_offset, 1, "x") == BREAKPOINT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Consumer:
    """A running tests.bench.consumer that has subscribed. `finish` once, inside the `with`."""

    def __init__(self, daemon: Daemon, *options: str) -> None:
        command = [sys.executable, "-m", "tests.bench.consumer", daemon.target, SELECTOR, "--buffer", str(BUFFER_KIB)]
        self._process = subprocess.Popen(
            [*command, *options], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert _read(self._process.stdout) == "ready"

    def finish(self) -> Consumed:
        """Unsubscribe, and wait until everything has been read."""
        _write(self._process.stdin, "end")
        return Consumed(**json.loads(_read(self._process.stdout)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a living process, to the nanosecond (clock_getcpuclockid(3), which Python lacks)."""
    cpu_clock_of_process = (~pid << 3) | 2
    return time.clock_gettime_ns(cpu_clock_of_process)


def percentile(values: list[int], share: float) -> float:
    return float(sorted(values)[int(share * (len(values) - 1))])


def _write(pipe: IO[str] | None, line: str) -> None:
    assert pipe is not None
    pipe.write(line + "\n")
    pipe.flush()


def _read(pipe: IO[str] | None) -> str:
    assert pipe is not None
    line = pipe.readline().rstrip("\n")
    assert line, "the process ended"
    return line
