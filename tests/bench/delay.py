"""How long an event is on its way: from the hit to the moment at which a client in another process has it."""

from __future__ import annotations

from tests.bench.report import Figure
from tests.bench.setup import Consumer, Firing, Setup, percentile

_RATE = 100


def run(setup: Setup) -> list[Figure]:
    figures = []
    with setup.daemon() as daemon, Firing(setup.folder) as firing:
        for encoding in ("columns", "rows"):
            with Consumer(daemon, "--encoding", encoding, "--delays") as consumer:
                firing.fire(seconds=3 if setup.quick else 10, rate=_RATE)
                delays = consumer.finish().delays_ns
            note = f"{_RATE} events a second"
            for name, share, most in (("p50", 0.5, 5e-3), ("p99", 0.99, 20e-3)):
                delay = percentile(delays, share) / 1e9
                goal = f"<= {most * 1e3:g} ms"
                figures.append(
                    Figure(f"hit to client, {encoding}, {name}", delay, "s", None, goal, delay <= most, note)
                )
    return figures
