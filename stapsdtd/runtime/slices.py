"""How long threads that everybody shares work at a stretch, while whatever waits for them does not get its turn.

Seconds of processor time, which a thread of Python spends with the interpreter's lock, or in the kernel.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stapsdtd.runtime.latency import Latency

TURN_SECONDS = 0.003
"""Of processor time that a step of longer work takes, before others have their turn."""


_TURNS_OF_PORTION = 4
"""What is done in parts has to be undone in parts: with links of 200 sites Unsubscribe took 2.7 times as long as with
links of 1,000.
"""


class Turn:
    """Tells work that is done in steps when one has taken long enough."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._until = time.thread_time() + TURN_SECONDS

    @property
    def is_over(self) -> bool:
        return time.thread_time() >= self._until


class Portion:
    """How much of some work fits into a few turns, learnt from how long the last part took.

    count: of the next part.
    """

    def __init__(self, first: int, least: int, most: int) -> None:
        self.count = first
        self._least = least
        self._most = most

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure a part."""
        begin = time.thread_time()
        yield
        most_seconds = _TURNS_OF_PORTION * TURN_SECONDS
        fits = self.count * most_seconds / max(time.thread_time() - begin, most_seconds / 2)
        self.count = max(self._least, min(int(fits), self._most))


def slices() -> Latency:
    """Return what measures the slices of a thread, and is used by that thread."""
    return Latency(time.thread_time)


class MeasuredLoop(asyncio.SelectorEventLoop):
    """slices: one for each time that the loop has run what was ready."""

    def __init__(self) -> None:
        self.slices = slices()
        super().__init__(_MeasuringSelector(self.slices))


class _MeasuringSelector(selectors.EpollSelector):
    """Observes how long the loop was busy between two calls of `select`."""

    def __init__(self, observed: Latency) -> None:
        super().__init__()
        self._observed = observed
        self._since: float | None = None

    # the keys' data is anything
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # type: ignore[explicit-any]
        if self._since is not None:
            self._observed.observe(time.thread_time() - self._since)
        ready = super().select(timeout)
        self._since = time.thread_time()
        return ready
