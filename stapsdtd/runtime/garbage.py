"""Collects cyclic garbage: the youngest often, all of it rarely.

A collection stops all threads, for about 100 ns an object. A full one looks at the sites of all subscriptions and
would take 0.3 s while a client has 50,000. So what the daemon lets go of must contain no cycle (`once_done`,
tests/api/test_garbage.py), and full collections, which are for what libraries leave behind, get a small share of time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from stapsdtd.runtime.timer import Timer

_THRESHOLDS = 1000, 5, 1 << 30
"""Of the youngest 1,000 objects, of the youngest 5,000, and never of all."""
_LOOK_SECONDS = 30.0
_COLLECTIONS_BETWEEN = 100
"""Of the youngest 5,000: half a million new objects."""
_SHARE = 0.001


class FullCollections:
    """Runs on an event loop, from begin() on."""

    def __init__(self, collect: Callable[[], object] = gc.collect, clock: Callable[[], float] = time.monotonic) -> None:
        self._collect = collect
        self._clock = clock
        self._not_before = clock()
        self._collected = _young_collections()
        self._timer = Timer(_LOOK_SECONDS, self.look)

    def begin(self) -> None:
        """Leave out what was made so far, which lives as long as the daemon."""
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        self._timer.set()

    def stop(self) -> None:
        self._timer.cancel()

    def look(self) -> None:
        """Collect everything if there may be much, and the last time is long enough ago."""
        self._timer.set()
        young, begin = _young_collections(), self._clock()
        if young - self._collected < _COLLECTIONS_BETWEEN or begin < self._not_before:
            return
        self._collect()
        self._collected, end = young, self._clock()
        self._not_before = end + (end - begin) / _SHARE


def _young_collections() -> int:
    collections: int = gc.get_stats()[1]["collections"]
    return collections
