"""Whose event is removed next.

The kernel removes one event at a time, and holds event_mutex for some 80 ms of each, while nobody on the host can arm a
uprobe (perf_trace_destroy, kernel/trace/trace_event_perf.c; measured on Linux 6.18). Hence:

1. Owners take turns, so that one with a thousand events keeps nobody waiting who has one.
2. What somebody waits for comes before what came and went by itself.
3. An owner whose objects come and go faster than _EVENTS_PER_SECOND for long is behind those whose do not, and is
   held up while they arm, but for one event each _TRICKLE_SECONDS.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

MOST_EPHEMERAL = 256
"""Of one user: each holds its object's file, which nobody else has any more, and three descriptors."""
MOST_OF_ALL = 4096

_EVENTS_PER_SECOND = 0.2
_BURST = 16
_QUIET_SECONDS = 0.5
_TRICKLE_SECONDS = 10.0
"""A removal hinders an arming that comes during it; one each 10 s are fewer than 1 % of them."""

_OWNERS_REMEMBERED = 1000


class _Queues(Generic[_T]):
    """One for each owner; the next owner is the one whose turn was the longest time ago."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[_T]] = OrderedDict()

    def put(self, owner: str, item: _T) -> None:
        self._of.setdefault(owner, deque()).append(item)

    def take(self, is_due: Callable[[str], bool] = lambda _: True) -> tuple[str, _T] | None:
        owner = next(filter(is_due, self._of), None)
        if owner is None:
            return None
        queue = self._of[owner]
        item = queue.popleft()
        if queue:
            self._of.move_to_end(owner)
        else:
            del self._of[owner]
        return owner, item

    def count(self, owner: str) -> int:
        return len(self._of.get(owner, ()))

    def items(self) -> list[_T]:
        return [item for queue in self._of.values() for item in queue]

    def owners(self) -> set[str]:
        return set(self._of)


class Turns(Generic[_T]):
    """Not locked. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._awaited = _Queues[_T]()
        self._passing = _Queues[_T]()
        self._paid_until: dict[str, float] = {}
        self._quiet_from = clock()
        self._trickled_at = clock()

    def put(self, owner: str, item: _T, *, is_awaited: bool) -> None:
        if is_awaited:
            self._awaited.put(owner, item)
            return
        self._passing.put(owner, item)
        now = self._clock()
        self._paid_until[owner] = max(self._paid_until.get(owner, 0.0), now) + 1 / _EVENTS_PER_SECOND
        if len(self._paid_until) > _OWNERS_REMEMBERED:
            self._paid_until = {other: until for other, until in self._paid_until.items() if until > now}

    def armed(self, owner: str) -> None:
        """The owner arms something, and may go on to do so."""
        if not self._is_busy(owner):
            self._quiet_from = self._clock() + _QUIET_SECONDS

    def _is_busy(self, owner: str) -> bool:
        return self._paid_until.get(owner, 0.0) - self._clock() > _BURST / _EVENTS_PER_SECOND

    def take(self, *, is_last: bool = False) -> _T | None:
        """Return what is to be removed now; None where that can wait, see `wait`. is_last: nothing can wait."""
        found = self._awaited.take() or self._passing.take(lambda owner: not self._is_busy(owner))
        if found is None and (is_last or self.wait <= 0):
            found = self._passing.take()
            if found is not None:
                self._trickled_at = self._clock()
        return None if found is None else found[1]

    @property
    def wait(self) -> float:
        """Seconds until those may go on who have to wait for others' arming."""
        return min(self._quiet_from, self._trickled_at + _TRICKLE_SECONDS) - self._clock()

    def awaited(self) -> list[_T]:
        return self._awaited.items()

    def items(self) -> list[_T]:
        return self._awaited.items() + self._passing.items()

    def count(self, owner: str) -> int:
        return self._awaited.count(owner) + self._passing.count(owner)

    @property
    def share(self) -> int:
        """How many each owner may have waiting of what there is room for."""
        owners = len(self._awaited.owners() | self._passing.owners())
        return MOST_OF_ALL // max(owners, 1)
