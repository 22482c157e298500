"""Whether the daemon's memory comes to rest under churn of 8 clients: `./dev soak --seconds 3600`.

Private memory, RssAnon, is what counts: VmRSS has the kernel's ring buffers too, which are mapped twice. It is to be
within 10 % of what it was after a sixth of the time: after 10 minutes of an hour.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.churn import Churn
from tests.support import descriptors, running_daemon, status_kib

_SAMPLES = 60
_MARK_PART = 6
_GROWTH = 1.1
_AROUND = 5
"""Samples whose median is looked at, since a single one may see a list of probes being sent."""


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    rounds: int
    anonymous_kib: int
    resident_kib: int
    descriptors: int

    @classmethod
    def of(cls, pid: int, seconds: float, rounds: int) -> Sample:
        anonymous, resident = (status_kib(pid, name) for name in ("RssAnon", "VmRSS"))
        return cls(seconds, rounds, anonymous, resident, descriptors(pid))

    def __str__(self) -> str:
        anonymous, resident = (f"{kib / 1024:.1f}" for kib in (self.anonymous_kib, self.resident_kib))
        return f"{self.seconds:>8.0f}{self.rounds:>8}{anonymous:>14}{resident:>10}{self.descriptors:>13}"


_TITLES = f"{'seconds':>8}{'rounds':>8}{'RssAnon MiB':>14}{'RSS MiB':>10}{'descriptors':>13}"


def soak(folder: Path, engine: str, seed: int, seconds: float) -> list[Sample]:
    """Print samples on the way; answer them."""
    samples: list[Sample] = []
    with running_daemon(folder, "--engine", engine) as daemon, ExitStack() as stack:
        driver = Churn(daemon, folder, engine, seed)
        stack.callback(driver.close)
        print(_TITLES, flush=True)
        begin = time.monotonic()
        driver.fill()
        while (elapsed := time.monotonic() - begin) < seconds:
            driver.round()
            if len(samples) < _SAMPLES * elapsed / seconds:
                samples.append(Sample.of(daemon.pid, time.monotonic() - begin, len(driver.samples)))
                print(samples[-1], flush=True)
        driver.finish()
        stack.pop_all().close()
    return samples


def growth(samples: Sequence[Sample], seconds: float) -> tuple[float, float]:
    """MiB of private memory at the mark and at the end."""
    at_mark = [sample for sample in samples if sample.seconds >= seconds / _MARK_PART][:_AROUND]
    mark, end = (
        statistics.median(sample.anonymous_kib for sample in part) / 1024 for part in (at_mark, samples[-_AROUND:])
    )
    return mark, end


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./dev soak", description="Exit 1 unless the daemon's memory comes to rest.")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--engine", choices=["bpf", "ftrace"], default="bpf")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="stapsdtd-soak-") as folder:
        samples = soak(Path(folder), options.engine, options.seed, options.seconds)
    mark, end = growth(samples, options.seconds)
    told = f"RssAnon {mark:.1f} MiB after {options.seconds / _MARK_PART:.0f} s, {end:.1f} MiB at the end"
    if end > _GROWTH * mark:
        print(f"{told}: more than 10 % more")
        return 1
    print(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
