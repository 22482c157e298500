"""How many events a second arrive of a thread that fires as fast as it can, what they cost, and if all are told of.

A rate is events by the time from the first hit to the last event's arrival, so that a buffer does not flatter it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import IO

from tests.bench.report import Figure, median_ratio
from tests.bench.setup import BUFFER_KIB, SELECTOR, Consumer, Fired, Firing, Setup, cpu_ns
from tests.bench.tracers import COUNT, tracers
from tests.support import Daemon, stapsdt_command, wait_for

_COLUMNS_RATE = 1.5e6
_COLUMNS_SHARE = 0.95
_ROWS_RATE = 0.4e6
_CPU_SECONDS = 0.4e-6


@dataclass(frozen=True, slots=True)
class Run:
    """cpu: what daemon and client spent for an event that arrived, in seconds. unexplained: events of no account."""

    fired: Fired
    rate: float
    lost: int
    daemon_cpu: float
    client_cpu: float
    unexplained: int

    @property
    def cpu(self) -> float:
        return self.daemon_cpu + self.client_cpu


def run(setup: Setup) -> list[Figure]:
    seconds = 3.0 if setup.quick else 10.0
    repeats = 1 if setup.quick else max(1, setup.repeats // 2)  # ten seconds each are repetition enough
    count = tracers().get(COUNT)
    columns: list[Run] = []
    rows: list[Run] = []
    printed: list[float] = []
    counted: list[float] = []
    with setup.daemon() as daemon, Firing(setup.folder) as firing:
        for _ in range(repeats):
            columns.append(streamed(daemon, firing, "columns", seconds))
            if count:
                with count(firing):
                    counted.append(firing.fire(seconds=seconds).rate)
            rows.append(streamed(daemon, firing, "rows", seconds))
            printed.append(_printed(daemon, firing, seconds))
    return [
        _columns_rate(columns, counted),
        Figure(
            "daemon and client for such an event",
            median(each.cpu for each in columns),
            "s",
            goal="<= 0.4 µs",
            met=median(each.cpu for each in columns) <= _CPU_SECONDS,
            note=_split(columns),
        ),
        Figure(
            "events a second, rows",
            median(each.rate for each in rows),
            "/s",
            goal=">= 0.4 M/s",
            met=median(each.rate for each in rows) >= _ROWS_RATE,
            note=_lost(rows) + _split(rows),
        ),
        Figure("events a second, stapsdt trace --json", median(printed), "/s"),
        Figure(
            "events that fired and are in no account",
            float(sum(each.unexplained for each in [*columns, *rows])),
            "",
            goal="0",
            met=not any(each.unexplained for each in [*columns, *rows]),
        ),
    ]


def _columns_rate(columns: list[Run], counted: list[float]) -> Figure:
    rates = [each.rate for each in columns]
    ratio = median_ratio(rates, counted)
    share = median(each.rate / each.fired.rate for each in columns)
    enough = median(rates) >= _COLUMNS_RATE or share >= _COLUMNS_SHARE
    lossless = not any(each.lost for each in columns)
    return Figure(
        "events a second, columns",
        median(rates),
        "/s",
        ratio,
        ">= 1.5 M/s or 0.95 of what is fired, none lost",
        enough and lossless,
        f"the ratio is to what fires under count(); {_lost(columns)}{_split(columns)}",
    )


def _lost(runs: list[Run]) -> str:
    """How many were lost, by the account that the client was given."""
    lost, fired = sum(each.lost for each in runs), sum(each.fired.fired for each in runs)
    return f"{lost:,} of {fired:,} lost at {median(each.fired.rate for each in runs) / 1e6:.2f} M/s; "


def _split(runs: list[Run]) -> str:
    daemon, client = median(each.daemon_cpu for each in runs), median(each.client_cpu for each in runs)
    return f"CPU an event: daemon {daemon * 1e6:.2f} µs, client {client * 1e6:.2f} µs"


def streamed(daemon: Daemon, firing: Firing, encoding: str, seconds: float) -> Run:
    with Consumer(daemon, "--encoding", encoding) as consumer:
        before = cpu_ns(daemon.pid)
        fired = firing.fire(seconds=seconds)
        consumed = consumer.finish()
        daemon_cpu = cpu_ns(daemon.pid) - before
    unexplained = abs(fired.fired - consumed.delivered - consumed.filtered - consumed.lost)
    unexplained += abs(consumed.events - consumed.delivered)
    if not consumed.lost:
        # the values are right where their sum is that of all numbers from 0
        unexplained += consumed.total != fired.fired * (fired.fired - 1) // 2
    return Run(
        fired,
        consumed.events / (consumed.last_ns - fired.begin_ns) * 1e9,
        consumed.lost,
        daemon_cpu / consumed.events / 1e9,
        consumed.cpu_ns / consumed.events / 1e9,
        unexplained,
    )


def _printed(daemon: Daemon, firing: Firing, seconds: float) -> float:
    """Lines a second that `stapsdt trace --json` writes into a pipe."""
    command = stapsdt_command(daemon.target, "trace", SELECTOR, "--json", "--buffer", str(BUFFER_KIB))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: firing.is_armed, "stapsdt trace to attach")
        assert process.stdout is not None
        lines = _LineCounter(process.stdout)
        fired = firing.fire(seconds=seconds)
        process.send_signal(signal.SIGINT)
        lines.thread.join()
    finally:
        process.kill()
        process.communicate()
    return lines.count / (lines.last_ns - fired.begin_ns) * 1e9


class _LineCounter:
    def __init__(self, pipe: IO[bytes]) -> None:
        self.count = 0
        self.last_ns = 0
        self._pipe = pipe
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while chunk := self._pipe.read(1 << 16):
            self.count += chunk.count(b"\n")
            self.last_ns = time.monotonic_ns()
