"""The daemon of this tree beside another revision's: `./dev bench --against REVISION [--pairs N]`.

One daemon runs at a time, and both in turn, so that what else the machine does falls on either. Programs and clients
are this tree's for both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Self

from stapsdtd.client import Client
from tests.bench import arming, rate, watching
from tests.bench.report import Figure
from tests.bench.setup import Consumer, Firing, Setup
from tests.support import COMMANDS, ROOT, Daemon, status_kib

PAIRS = 20
_HITS = 50_000
_BURSTS = 5
_SECONDS = 2
_IDLE_SECONDS = 12
"""An idle daemon wakes up once in some seconds: of few wakes, a ratio would be chance."""
_MOST = 1.03
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str
    unit: str


_HIT = _Quantity("a hit, 3 arguments, streamed in columns", "s")
_EVENT = _Quantity("from event to event at full speed", "s")
_DAEMON = _Quantity("the daemon's CPU time for such an event", "s")
_SUBSCRIBE = _Quantity("Subscribe returns, 1,000 sites", "s")
_UNSUBSCRIBE = _Quantity("Unsubscribe returns, 1,000 sites", "s")
_EXEC = _Quantity("daemon, 1,000 exec/s, nothing subscribed", "% of a core")
_IDLE = _Quantity("daemon idles among 1,000 processes", "% of a core")
_MEMORY = _Quantity("its private memory after all this", "MiB")
_QUANTITIES = (_HIT, _EVENT, _DAEMON, _SUBSCRIBE, _UNSUBSCRIBE, _EXEC, _IDLE, _MEMORY)

_Sample = dict[_Quantity, float]


def run(setup: Setup, revision: str, pairs: int) -> list[Figure]:
    with _tree(revision) as tree, _Programs(setup.folder) as programs:
        before: list[_Sample] = []
        now: list[_Sample] = []
        sides = [(tree / ".venv/bin", before), (COMMANDS, now)]
        for pair in range(pairs):
            print(f"bench: pair {pair + 1} of {pairs} …", file=sys.stderr)
            for commands, samples in sides:
                with setup.daemon(commands) as daemon:
                    samples.append(programs.measure(daemon))
            sides.reverse()
    return [_figure(each, before, now) for each in _QUANTITIES]


@contextmanager
def _tree(revision: str) -> Iterator[Path]:
    """Check a revision out and set it up, elsewhere."""
    with tempfile.TemporaryDirectory(prefix="stapsdtd-bench-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            subprocess.run([tree / "dev", "setup"], check=True, stdout=sys.stderr)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


class _Programs:
    """What runs beside the daemons: a program that fires, one that has sites, processes that sleep."""

    def __init__(self, folder: Path) -> None:
        self._firing = Firing(folder)
        self._storm = watching.compiled(folder, "storm", watching.STORM)
        self._processes = [subprocess.Popen([arming.program(folder)])]
        self._processes += [subprocess.Popen(["/bin/sleep", "1000000"]) for _ in range(watching.PROCESSES)]

    def measure(self, daemon: Daemon) -> _Sample:
        sample: _Sample = {}
        with Consumer(daemon) as consumer:
            sample[_HIT] = median(self._firing.fire(_HITS).seconds_a_hit for _ in range(_BURSTS))
            assert consumer.finish().events == _BURSTS * _HITS
        streamed = rate.streamed(daemon, self._firing, "columns", _SECONDS)
        sample[_EVENT], sample[_DAEMON] = 1 / streamed.rate, streamed.daemon_cpu
        with Client(daemon.target) as client:
            sample[_SUBSCRIBE], sample[_UNSUBSCRIBE] = arming.through_the_api(client)
        storm = [str(self._storm), "/bin/true", str(watching.RATE), str(watching.RATE * _SECONDS)]
        sample[_EXEC] = 100 * watching.share(daemon.pid, storm)
        sample[_IDLE] = 100 * watching.share(daemon.pid, ["/bin/sleep", str(_IDLE_SECONDS)])
        sample[_MEMORY] = status_kib(daemon.pid, "RssAnon") / 1024
        return sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._firing.__exit__()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _figure(quantity: _Quantity, before: Sequence[_Sample], now: Sequence[_Sample]) -> Figure:
    ratios = sorted(mine[quantity] / other[quantity] for mine, other in zip(now, before, strict=True))
    ratio = median(ratios)
    low, high = interval(ratios)
    return Figure(
        quantity.name,
        median(each[quantity] for each in now),
        quantity.unit,
        ratio,
        f"<= {_MOST} of before",
        ratio <= _MOST,
        f"ratio {low:.3f} to {high:.3f} ({_CONFIDENCE:.0%})",
    )


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return between which of the values the median of all there could be lies, by counting alone."""
    count = len(ordered)
    outside, beyond = 0, 0.0
    while outside < count // 2 and beyond + comb(count, outside) / 2**count <= (1 - _CONFIDENCE) / 2:
        beyond += comb(count, outside) / 2**count
        outside += 1
    first = max(outside - 1, 0)
    return ordered[first], ordered[count - 1 - first]
