"""Pages that hits did not find in memory are brought in from outside, for the next hit.

    reader ──request──► a line for each owner ──one worker each──► touch

Who owns a page decides how long it takes: it may be on a file system of the owner's own, or be served by userfaultfd.
So an owner has one worker at a time, and while that waits, only what is the same owner's waits too. Memory of files
that an owner can have hang is not touched at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)

_MOST_WORKERS = 16
_MOST_WAITING = 64
_REMEMBERED = 4096
_AGAIN_SECONDS = 1.0
"""A page that was touched is not touched again for so long; it may have been reclaimed since."""
_STUCK_SECONDS = 1.0
_PAGE_BYTES = 4096

Touch = Callable[[int, int, int], None]
"""pid, address, bytes. Raises OSError."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    pid: int
    address: int
    byte_count: int


@dataclass(slots=True)
class _Line:
    """since: when its worker began with what it is at."""

    waiting: deque[_Wanted] = field(default_factory=deque)
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class PagingMetrics:
    """touched, refused: pages since the daemon began; stuck: workers that have waited for longer than a second."""

    touched: int
    refused: int
    stuck: int


class Paging:
    """request() is called by one thread and never waits; metrics() by any."""

    def __init__(
        self,
        touch: Touch,
        owner_of: Callable[[int], int],
        room: Callable[[int, int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """owner_of: a pid's user, without waiting. room: how many bytes of its memory may be touched from an address
        on; it may wait.
        """
        self._touch = touch
        self._owner_of = owner_of
        self._room = room
        self._clock = clock
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._lately: OrderedDict[tuple[int, int], float] = OrderedDict()
        self._touched = self._refused = 0

    def request(self, pid: int, address: int, byte_count: int) -> None:
        """Have memory of a process brought in, unless too much of its owner's waits already."""
        page, now = (pid, address // _PAGE_BYTES), self._clock()
        if now - self._lately.get(page, -_AGAIN_SECONDS) < _AGAIN_SECONDS:
            return
        self._lately[page] = now
        self._lately.move_to_end(page)
        if len(self._lately) > _REMEMBERED:
            self._lately.popitem(last=False)
        owner = self._owner_of(pid)
        with self._lock:
            line = self._lines.get(owner)
            if line is None and len(self._lines) >= _MOST_WORKERS:
                self._refused += 1
                return
            if line is not None:
                if len(line.waiting) >= _MOST_WAITING:
                    self._refused += 1
                else:
                    line.waiting.append(_Wanted(pid, address, byte_count))
                return
            line = self._lines[owner] = _Line(deque([_Wanted(pid, address, byte_count)]), now)
        # a daemon thread, since the daemon's end must not wait for it
        worker = threading.Thread(target=self._work, args=(owner, line), name="stapsdtd-paging", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:
            # as many threads as this host lets it have; a later hit's page finds the line gone
            _log.warning("memory that hits did not find cannot be brought in: %s", error)
            with self._lock:
                del self._lines[owner]
                self._refused += 1

    def metrics(self) -> PagingMetrics:
        now = self._clock()
        with self._lock:
            stuck = sum(now - line.since > _STUCK_SECONDS for line in self._lines.values())
            return PagingMetrics(self._touched, self._refused, stuck)

    def _work(self, owner: int, line: _Line) -> None:
        while True:
            with self._lock:
                if not line.waiting:
                    del self._lines[owner]
                    return
                wanted = line.waiting.popleft()
                line.since = self._clock()
            self._bring_in(wanted)

    def _bring_in(self, wanted: _Wanted) -> None:
        try:
            room = self._room(wanted.pid, wanted.address)
            if not room:
                with self._lock:
                    self._refused += 1
                return
            self._touch(wanted.pid, wanted.address, min(wanted.byte_count, room))
        except OSError as error:
            # the process may be gone, or the address lead nowhere
            _log.debug("pid %d: memory at %#x cannot be brought in: %s", wanted.pid, wanted.address, error)
        else:
            with self._lock:
                self._touched += 1
