"""What the processes of one user may take of the daemon, so that there is enough of it for the others'.

root's are not bounded: who is root needs no probes to bring the host down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stapsdtd.model import Object, ObjectKey

_ROOT = 0

_SHARE = 0.3
"""Seconds of the control thread that a user gets each second, ..."""
_MOST_SECONDS = 1.0
"""... and as many at once."""
_SLICE_SECONDS = 0.1
_USERS = 1000

MAX_WEIGHT = 1_000_000
"""Objects and notes together that a user may have the daemon know: some 200 MB at most."""


def user_of(pid: int) -> int:
    """Whom a process counts for; root where it is gone, which costs little."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return _ROOT


class CpuBudget:
    """Counts what each user's processes and files take of the control thread's time, and of the arming thread's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at: dict[int, float] = {}

    def left(self, user: int) -> float:
        """Seconds that a user may take now; not above 0 where that is nothing."""
        if user == _ROOT:
            return float("inf")
        owed = self._free_at.get(user, 0.0) - self._clock()
        return _MOST_SECONDS - max(owed, 0.0) * _SHARE

    def slice(self, user: int) -> float:
        """Seconds that a user may take before others have their turn."""
        return min(self.left(user), _SLICE_SECONDS) if user != _ROOT else float("inf")

    @contextmanager
    def taken(self, user: int) -> Iterator[None]:
        """Count the time that passes within as a user's."""
        begin = self._clock()
        try:
            yield
        finally:
            self.charge(user, self._clock() - begin)

    def charge(self, user: int, seconds: float) -> None:
        """Count seconds as a user's."""
        if user == _ROOT:
            return
        now = self._clock()
        self._free_at[user] = max(self._free_at.get(user, 0.0), now) + seconds / _SHARE
        if len(self._free_at) > _USERS:
            self._free_at = {other: free for other, free in self._free_at.items() if free > now}


class MemoryBudget:
    """Counts what the daemon knows because of each user's processes."""

    def __init__(self) -> None:
        self._weights: dict[int, int] = {}
        self._owners: dict[ObjectKey, tuple[int, int]] = {}

    def admit(self, user: int, found: Object) -> bool:
        """Report whether there is room for an object, which counts as the user's until it is released."""
        if found.key in self._owners:
            return True
        weight, held = _weight(found), self._weights.get(user, 0)
        if user != _ROOT and held + weight > MAX_WEIGHT:
            return False
        self._weights[user] = held + weight
        self._owners[found.key] = user, weight
        return True

    def release(self, key: ObjectKey) -> None:
        user, weight = self._owners.pop(key, (_ROOT, 0))
        left = self._weights.get(user, 0) - weight
        if left > 0:
            self._weights[user] = left
        else:
            self._weights.pop(user, None)


def _weight(found: Object) -> int:
    return 1 + len(found.parsed.problems) + len(found.parsed.sites)
