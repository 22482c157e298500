"""What a hit costs the traced program while its events are streamed, beside perf's and bpftrace's count."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tests.bench.report import Figure
from tests.support import Daemon, Recorder, Ticker, compile_target, wait_for

_HITS = 200_000


def run(folder: Path, repeats: int) -> list[Figure]:
    path = compile_target("ticker.c", folder / "ticker", "-ldl", "-lpthread")
    daemon = Daemon(folder)
    ours: list[float] = []
    counted: list[float] = []
    delivered: list[float] = []
    try:
        with Ticker(path) as ticker:
            for _ in range(repeats):
                with Recorder(daemon.target, "ticker:tick", kernel_buffer_kib=65536) as recorder:
                    ours.append(_seconds(lambda: ticker.do(f"fire {_HITS}")))
                    account = recorder.finish()
                    delivered.append(account.delivered / account.fired)
                if shutil.which("bpftrace"):
                    with _bpftrace(path, ticker):
                        counted.append(_seconds(lambda: ticker.do(f"fire {_HITS}")))
    finally:
        daemon.stop()
    ratio = median(mine / theirs for mine, theirs in zip(ours, counted, strict=True)) if counted else None
    figures = [
        Figure("a hit, 3 arguments, streamed in rows", median(ours) / _HITS, "s", ratio),
        Figure("events of a burst that arrive", median(delivered), "", None),
    ]
    if counted:
        figures.append(Figure("a hit under bpftrace { @ = count(); }", median(counted) / _HITS, "s", None))
    return figures


@contextmanager
def _bpftrace(path: Path, ticker: Ticker) -> Iterator[None]:
    program = f"usdt:{path}:ticker:tick {{ @ = count(); }}"
    process = subprocess.Popen(
        ["bpftrace", "-p", str(ticker.pid), "-e", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: ticker.semaphore == 1, "bpftrace to attach")
        yield
    finally:
        process.terminate()
        process.wait()
        wait_for(lambda: ticker.semaphore == 0, "bpftrace to detach")


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
