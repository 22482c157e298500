"""Have programs do something while a command traces them, and return what both said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Generic, Self, TypeVar

from stapsdtd.client import Client
from tests.support import TIME_FACTOR, compile_target, stapsdt_command, wait_for

_T = TypeVar("_T")

PROVIDER = f"p{os.getpid()}truth"
_SECONDS = 120.0


class Program:
    """A running tests/targets/truth.c."""

    def __init__(self, folder: Path) -> None:
        path = folder / "truth"
        if not path.exists():
            compile_target("truth.c", path, f"-DPROVIDER={PROVIDER}", "-lpthread")
        self._process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._read() == "ready\n"

    def begin(self, order: str, count: int, threads: int = 1, extra: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order} {count} {threads} {extra}\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        """Return what it says of an order that was begun."""
        return json.loads(self._read())

    def do(self, order: str, count: int, threads: int = 1, extra: int = 0) -> Any:
        self.begin(order, count, threads, extra)
        return self.finish()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Told(Generic[_T]):
    """truth: what the programs said. records: what the command printed. summary: of it."""

    truth: _T
    records: Sequence[dict[str, Any]]
    summary: dict[str, Any]


def ask(
    target: str, *arguments: str, sites: int, pids: Iterable[int], work: Callable[[subprocess.Popen[bytes]], _T]
) -> Told[_T]:
    """Run a command, have work done once its sites are armed, and end it."""
    options = [part for pid in pids for part in ("--pid", str(pid))]
    with TemporaryFile() as output, TemporaryFile() as errors, Client(target) as client:
        before = {each.id for each in client.subscriptions()}
        command = stapsdt_command(target, *arguments, *options, "--json")
        with _started(command, output, errors) as asking:

            def is_armed() -> bool:
                assert asking.poll() is None, _written(errors)
                new = [each for each in client.subscriptions() if each.id not in before]
                return any(each.streaming and each.account.sites >= sites for each in new)

            wait_for(is_armed, f"{' '.join(arguments)} to be armed", seconds=60)
            truth = work(asking)
            asking.send_signal(signal.SIGINT)
            asking.wait(timeout=_SECONDS * TIME_FACTOR)
        return Told(truth, _records(_written(output)), _summary(_written(errors)))


def ask_of_command(target: str, *arguments: str, command: Sequence[str]) -> Told[str]:
    """Trace a command, and return what it printed as its truth."""
    with TemporaryFile() as output, TemporaryFile() as errors, TemporaryFile() as records:
        place = f"/proc/{os.getpid()}/fd/{records.fileno()}"
        asking = stapsdt_command(target, *arguments, "--json", "-o", place, "--", *command)
        with _started(asking, output, errors) as started:
            started.wait(timeout=_SECONDS * TIME_FACTOR)
        return Told(_written(output), _records(_written(records)), _summary(_written(errors)))


@contextmanager
def _started(command: Sequence[str], output: IO[bytes], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(command, stdout=output, stderr=errors)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def _written(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _summary(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert lines, text
    summary: dict[str, Any] = json.loads(lines[-1])
    return summary


def real_minus_monotonic_ns() -> int:
    """Return what is to be added to a time of CLOCK_MONOTONIC."""
    return time.time_ns() - time.monotonic_ns()
