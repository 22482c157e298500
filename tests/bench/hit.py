"""What a hit costs the traced program while each event is streamed to a client, beside what other tracers make it pay.

All of it is CPU time of the program: what it waits for a CPU, which daemon and client may use, is no cost of a hit.
"""

from __future__ import annotations

from statistics import median

from tests.bench.report import Figure, median_ratio
from tests.bench.setup import Consumer, Firing, Setup
from tests.bench.tracers import COUNT, PRINTF, tracers

_HITS = 400_000
_FEW_HITS = 20_000  # for a tracer that takes ten times as long
_MOST = 1.2


def run(setup: Setup) -> list[Figure]:
    known = tracers()
    ours: list[float] = []
    arrived: list[float] = []
    untraced: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in known}
    with setup.daemon() as daemon, Firing(setup.folder) as firing:
        for _ in range(setup.repeats):
            with Consumer(daemon) as consumer:
                ours.append(firing.fire(_HITS).seconds_a_hit)
                arrived.append(consumer.finish().events / _HITS)
            for name, tracer in known.items():
                with tracer(firing):
                    others[name].append(firing.fire(_FEW_HITS if name == PRINTF else _HITS).seconds_a_hit)
            untraced.append(firing.fire(_HITS).seconds_a_hit)
    count = others.get(COUNT, [])
    ratio = median_ratio(ours, count)
    figures = [
        Figure(
            "a hit, 3 arguments, streamed in columns",
            median(ours),
            "s",
            ratio,
            f"<= {_MOST} of {COUNT}",
            None if ratio is None else ratio <= _MOST,
            f"CPU time; {median(arrived):.1%} of the events arrived",
        )
    ]
    for name, seconds in others.items():
        figures.append(Figure(f"a hit under {name}", median(seconds), "s", median_ratio(seconds, count)))
    return [*figures, Figure("a hit that nobody traces", median(untraced), "s", median_ratio(untraced, count))]
