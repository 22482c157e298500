"""Bounds the CPU time and memory that one user's processes may cost the daemon, so that enough is left for others'.

Processes of root are not bounded: root needs no probes to bring the host down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stapsdtd.model import Object, ObjectKey

_ROOT = 0
NOBODY = -1
"""In place of the user of a process that is gone."""

_SHARE = 0.25
"""Seconds of the control thread that a user gets each second, ..."""
_MAX_SECONDS = 0.25
"""... and as many at once."""
_SLICE_SECONDS = 0.004
"""A process with more files than can be looked at in that time is looked at again, and goes on where it was."""
_USERS = 1000

_MAX_WEIGHT = 1_000_000
"""Objects and notes together that a user may have the daemon know: some 200 MB at most."""


def user_of(pid: int) -> int:
    """Return the uid that a process counts for; root if it is gone, which costs little."""
    user = user_or_nobody(pid)
    return _ROOT if user == NOBODY else user


def user_or_nobody(pid: int) -> int:
    """Return the uid that a process counts for, or NOBODY if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return NOBODY


class CpuBudget:
    """Counts the time that each user's processes and files take of the control thread and the arming thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_until: dict[int, float] = {}

    def left(self, user: int) -> float:
        """Return the seconds that a user may take now; 0 or less if none."""
        if user == _ROOT:
            return float("inf")
        owed = self._paid_until.get(user, 0.0) - self._clock()
        return _MAX_SECONDS - max(owed, 0.0) * _SHARE

    def slice(self, user: int) -> float:
        """Return the seconds that a user may take before others have their turn."""
        return min(self.left(user), _SLICE_SECONDS) if user != _ROOT else float("inf")

    @contextmanager
    def taken(self, user: int) -> Iterator[None]:
        """Charge the time spent in the block to a user."""
        begin = self._clock()
        try:
            yield
        finally:
            self.charge(user, self._clock() - begin)

    def charge(self, user: int, seconds: float) -> None:
        """Charge seconds to a user."""
        if user == _ROOT:
            return
        now = self._clock()
        self._paid_until[user] = max(self._paid_until.get(user, 0.0), now) + seconds / _SHARE
        if len(self._paid_until) > _USERS:
            self._paid_until = {other: until for other, until in self._paid_until.items() if until > now}


class MemoryBudget:
    """Counts the objects and notes that the daemon holds because of each user's processes.

    max_weight: how many a user may have.
    """

    def __init__(self, max_weight: int = _MAX_WEIGHT) -> None:
        self._max_weight = max_weight
        self._weights: dict[int, int] = {}
        self._owners: dict[ObjectKey, tuple[int, int]] = {}

    def admit(self, user: int, obj: Object) -> bool:
        """Report whether there is room for an object, and charge it to the user until it is released."""
        if obj.key in self._owners:
            return True
        weight, used = _weight(obj), self._weights.get(user, 0)
        if user != _ROOT and used + weight > self._max_weight:
            return False
        self._weights[user] = used + weight
        self._owners[obj.key] = user, weight
        return True

    def release(self, key: ObjectKey) -> int:
        """Return the user who has more room now."""
        user, weight = self._owners.pop(key, (_ROOT, 0))
        left = self._weights.get(user, 0) - weight
        if left > 0:
            self._weights[user] = left
        else:
            self._weights.pop(user, None)
        return user


def _weight(obj: Object) -> int:
    return 1 + len(obj.parsed.problems) + len(obj.parsed.sites)
