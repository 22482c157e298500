"""How long something takes, counted in buckets: written by one thread, read by any."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""In seconds, each included in its bucket; one more bucket holds what is beyond."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """counts: by bucket, one more than there are BOUNDS."""

    counts: tuple[int, ...]
    total_seconds: float


class Latency:
    """One kind of work's."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total_seconds += seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is done within counts, also where it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.observe(time.perf_counter() - begin)

    def distribution(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total_seconds)
