"""Decides which event is removed next.

The kernel removes one event at a time, and holds event_mutex for some 80 ms of each, while nobody on the host can arm a
uprobe (perf_trace_destroy, kernel/trace/trace_event_perf.c; measured on Linux 6.18). Hence:

1. Owners take turns, so that one with a thousand events does not delay one with a single event.
2. Removals that somebody waits for come before those of objects that went by themselves.
3. Owners whose objects come and go faster than _EVENTS_PER_SECOND for long come after all others. While others arm,
   they get one removal each _TRICKLE_SECONDS.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

MAX_EPHEMERAL = 256
"""Of one user. Each keeps an otherwise deleted file, and three descriptors."""
MAX_WAITING = 4096

_EVENTS_PER_SECOND = 0.2
_BURST = 16
_QUIET_SECONDS = 0.5
_TRICKLE_SECONDS = 10.0
"""A removal delays an arming that comes during it; at one each 10 s that happens to fewer than 1 % of them."""

_OWNERS_REMEMBERED = 1000


class _Queues(Generic[_T]):
    """A queue for each owner. The owner whose turn was the longest time ago is next."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[_T]] = OrderedDict()

    def put(self, owner: str, item: _T) -> None:
        self._by_owner.setdefault(owner, deque()).append(item)

    def take(self, is_due: Callable[[str], bool] = lambda _: True) -> tuple[str, _T] | None:
        owner = next(filter(is_due, self._by_owner), None)
        if owner is None:
            return None
        queue = self._by_owner[owner]
        item = queue.popleft()
        if queue:
            self._by_owner.move_to_end(owner)
        else:
            del self._by_owner[owner]
        return owner, item

    def count(self, owner: str) -> int:
        return len(self._by_owner.get(owner, ()))

    def items(self) -> list[_T]:
        return [item for queue in self._by_owner.values() for item in queue]

    def owners(self) -> set[str]:
        return set(self._by_owner)


class Turns(Generic[_T]):
    """Not locked. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._awaited = _Queues[_T]()
        self._unawaited = _Queues[_T]()
        self._paid_until: dict[str, float] = {}
        self._quiet_from = clock()
        self._trickled_at = clock()

    def put(self, owner: str, item: _T, *, is_awaited: bool) -> None:
        if is_awaited:
            self._awaited.put(owner, item)
            return
        self._unawaited.put(owner, item)
        now = self._clock()
        self._paid_until[owner] = max(self._paid_until.get(owner, 0.0), now) + 1 / _EVENTS_PER_SECOND
        if len(self._paid_until) > _OWNERS_REMEMBERED:
            self._paid_until = {other: until for other, until in self._paid_until.items() if until > now}

    def armed(self, owner: str) -> None:
        """Note that an owner arms something, and may go on to do so."""
        if not self._is_busy(owner):
            self._quiet_from = self._clock() + _QUIET_SECONDS

    def _is_busy(self, owner: str) -> bool:
        return self._paid_until.get(owner, 0.0) - self._clock() > _BURST / _EVENTS_PER_SECOND

    def take(self, *, is_last: bool = False) -> _T | None:
        """Return what is to be removed now, or None if the rest is to wait, see `wait`. is_last: nothing is to wait."""
        taken = self._awaited.take() or self._unawaited.take(lambda owner: not self._is_busy(owner))
        if taken is None and (is_last or self.wait <= 0):
            taken = self._unawaited.take()
            if taken is not None:
                self._trickled_at = self._clock()
        return None if taken is None else taken[1]

    @property
    def wait(self) -> float:
        """Return the seconds until removals may go on that have to wait for others' arming."""
        return min(self._quiet_from, self._trickled_at + _TRICKLE_SECONDS) - self._clock()

    def awaited(self) -> list[_T]:
        return self._awaited.items()

    def items(self) -> list[_T]:
        return self._awaited.items() + self._unawaited.items()

    def count(self, owner: str) -> int:
        return self._awaited.count(owner) + self._unawaited.count(owner)

    @property
    def share(self) -> int:
        """Return how many removals of each owner may wait, of what there is room for."""
        owners = len(self._awaited.owners() | self._unawaited.owners())
        return MAX_WAITING // max(owners, 1)
