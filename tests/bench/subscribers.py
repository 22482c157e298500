"""What ten further subscribers of a probe cost the program that fires it.

It fires at a fixed rate, so that what the daemon and the clients do leaves it a CPU.
"""

from __future__ import annotations

from statistics import median

from tests.bench.report import Figure, median_ratio
from tests.bench.setup import Consumer, Firing, Setup

_RATE = 100_000
_FURTHER = 10
_MOST = 1.05


def run(setup: Setup) -> list[Figure]:
    seconds = 1.0 if setup.quick else 3.0
    one: list[float] = []
    eleven: list[float] = []
    with setup.daemon() as daemon, Firing(setup.folder) as firing, Consumer(daemon):
        for _ in range(setup.repeats):
            with Consumer(daemon, "--subscriptions", str(_FURTHER)) as further:
                eleven.append(firing.fire(seconds=seconds, rate=_RATE).seconds_a_hit)
                further.finish()
            one.append(firing.fire(seconds=seconds, rate=_RATE).seconds_a_hit)
    ratio = median_ratio(eleven, one)
    return [
        Figure(
            f"a hit, {1 + _FURTHER} subscribers",
            median(eleven),
            "s",
            ratio,
            f"<= {_MOST} of one subscriber",
            ratio is not None and ratio <= _MOST,
            f"CPU time at {_RATE:,} hits a second",
        ),
        Figure("a hit, 1 subscriber", median(one), "s"),
    ]
