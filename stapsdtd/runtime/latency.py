"""Histograms of latencies, written by one thread and read by any."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Inclusive upper bounds of the buckets, in seconds; one more bucket counts everything above."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """counts: per bucket, one more than there are BOUNDS."""

    counts: tuple[int, ...]
    total_seconds: float


class Latency:
    """The latency of one kind of work."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: in seconds."""
        self._clock = clock
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total_seconds += seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Observe the time spent in the with block, even if it raises."""
        begin = self._clock()
        try:
            yield
        finally:
            self.observe(self._clock() - begin)

    def distribution(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total_seconds)
