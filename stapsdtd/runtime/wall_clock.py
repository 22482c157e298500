"""Which wall-clock time belongs to a monotonic one: the only place that decides it.

    monotonic     100 s               160 s               200 s
    offset        1,700,000,000 s ──► │ 1,700,003,600 s ──►
                                      the clock was set forward by an hour

The kernel adjusts the rate of both clocks alike (adjtimex(2)), so that their offset stays the same until the clock is
set, a leap second comes, or the host was suspended. What happened at a monotonic time has the offset of that time
forever, however often and whenever it is looked up.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

_TRIES = 5
_MOST_CHANGES = 10_000
"""Of which it knows. What happened before them has the offset of the oldest one."""


class Reading(NamedTuple):
    """offset_ns: of the wall clock from the monotonic one. suspended_ns: how long the host was suspended since it
    booted. Both give or take error_ns.
    """

    offset_ns: int
    suspended_ns: int
    error_ns: int


def read_clocks() -> Reading:
    """Read the clocks at one moment, as nearly as possible."""
    readings = []
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        wall, since_boot = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        after = time.monotonic_ns()
        between = (before + after) // 2
        readings.append(Reading(wall - between, since_boot - between, after - before + 1))
    return min(readings, key=lambda reading: reading.error_ns)


@dataclass(frozen=True, slots=True)
class ClockChange:
    """monotonic_ns: when it was noticed. offset_ns: from then on. by_ns: how far the clock was set forward.
    suspended_ns: how long the host was suspended.
    """

    monotonic_ns: int
    offset_ns: int
    by_ns: int
    suspended_ns: int

    @property
    def time_ns(self) -> int:
        """When it was noticed, by the changed clock."""
        return self.monotonic_ns + self.offset_ns


class WallClock:
    """Any thread may use it.

    A change is noticed after all that has been looked up before, since `look` takes the lock before it reads the
    clocks, and who looks up something asks about the past.
    """

    def __init__(
        self, read: Callable[[], Reading] = read_clocks, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._read = read
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._last = first = read()
        # no change, but where the others begin
        self._changes = [ClockChange(monotonic_ns(), first.offset_ns, 0, 0)]
        self._waiters: list[Callable[[], object]] = []

    def look(self) -> None:
        """Notice if the clock was set since the last call, and wake who waits for that."""
        with self._lock:
            last, found = self._last, self._read()
            error_ns = last.error_ns + found.error_ns
            if abs(found.offset_ns - last.offset_ns) <= error_ns:
                return
            self._last = found
            suspended_ns = found.suspended_ns - last.suspended_ns
            suspended_ns = suspended_ns if suspended_ns > error_ns else 0
            by_ns = found.offset_ns - last.offset_ns - suspended_ns
            by_ns = by_ns if abs(by_ns) > error_ns else 0
            change = ClockChange(self._monotonic_ns(), found.offset_ns, by_ns, suspended_ns)
            self._changes = [*self._changes, change][-_MOST_CHANGES:]
            waiters = list(self._waiters)
        _log.warning("the clock was set by %+.9g s, and the host suspended for %.9g s", by_ns / 1e9, suspended_ns / 1e9)
        for waiter in waiters:
            waiter()

    def wake_with(self, waiter: Callable[[], object]) -> Callable[[], None]:
        """Call waiter, in the thread that looks, after each change. Return a function that ends that."""
        with self._lock:
            self._waiters.append(waiter)

        def end() -> None:
            with self._lock:
                self._waiters.remove(waiter)

        return end

    def changes_after(self, monotonic_ns: int) -> list[ClockChange]:
        """Return those that were noticed later."""
        changes = self._known()
        if changes[-1].monotonic_ns <= monotonic_ns:
            return []
        return changes[max(bisect_right(changes, monotonic_ns, key=_noticed), 1) :]

    def time_ns(self, monotonic_ns: int) -> int:
        """Return what the wall clock showed at a past time."""
        changes = self._known()
        return monotonic_ns + changes[max(bisect_right(changes, monotonic_ns, key=_noticed) - 1, 0)].offset_ns

    def spans(self, monotonic_ns: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Return the begin, the end and the offset of each run of past times that have the same one."""
        changes, count = self._known(), len(monotonic_ns)
        if not count:
            return []
        if len(changes) == 1 or int(monotonic_ns.min()) >= changes[-1].monotonic_ns:
            return [(0, count, changes[-1].offset_ns)]
        at = np.searchsorted([change.monotonic_ns for change in changes], monotonic_ns, "right").clip(1) - 1
        cuts = (np.flatnonzero(np.diff(at)) + 1).tolist()
        return [(begin, end, changes[int(at[begin])].offset_ns) for begin, end in pairwise([0, *cuts, count])]

    def _known(self) -> list[ClockChange]:
        with self._lock:
            return self._changes


def _noticed(change: ClockChange) -> int:
    return change.monotonic_ns
