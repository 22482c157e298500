"""The daemon's processor time while the kernel adds up: it should not depend on how often probes fire."""

from __future__ import annotations

import time
from statistics import median

from stapsdtd.client import Aggregate, Client, SubscribeOptions
from tests.bench.report import Figure
from tests.bench.setup import SELECTOR, Firing, Setup, cpu_ns
from tests.support import Daemon

_SLOW = 10_000
_MOST = 1.25
_WANTED = Aggregate(functions=["count", "max", "percentiles"], value="arg0", by=["pid"], interval_ms=1000)


def run(setup: Setup) -> list[Figure]:
    seconds = 3 if setup.quick else 10
    with setup.daemon() as daemon, Firing(setup.folder) as firing, Client(daemon.target) as client:
        options = SubscribeOptions(pids=[firing.pid])
        with client.aggregate(SELECTOR.partition("(")[0], _WANTED, options) as subscription:
            slow, fast, rates = [], [], []
            for _ in range(setup.repeats):
                slow.append(_share(daemon, firing, seconds, _SLOW)[0])
                share, rate = _share(daemon, firing, seconds, 0)
                fast.append(share)
                rates.append(rate)
            account = subscription.unsubscribe()
            assert account.lost == 0, account
    ratio = median(fast) / median(slow)
    goal = f"<= {_MOST} of that at {_SLOW:,} hits/s"
    return [
        Figure(f"the daemon adds up {_SLOW:,} hits/s", median(slow) * 100, "% of a core", None, "", None, ""),
        Figure("the daemon adds up at full speed", median(fast) * 100, "% of a core", ratio, goal, ratio <= _MOST,
               f"{median(rates):,.0f} hits/s"),
    ]  # fmt: skip


def _share(daemon: Daemon, firing: Firing, seconds: float, rate: int) -> tuple[float, float]:
    """Return what the daemon takes of a core, and how often the program fired a second."""
    cpu, begin = cpu_ns(daemon.pid), time.monotonic_ns()
    fired = firing.fire(seconds=seconds, rate=rate)
    return (cpu_ns(daemon.pid) - cpu) / (time.monotonic_ns() - begin), fired.rate
