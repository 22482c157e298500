"""Brings in pages that hits did not find in memory, so that the next hit does.

    reader ──request──► a queue for each owner ──one worker each──► touch

A page's owner decides how long that takes: the page may be on the owner's own file system, or be served by userfaultfd.
So each owner has one worker, and a worker that waits delays only the same owner's pages. Files whose reads an owner can
make hang are not touched at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
"""Until a page that was touched may be touched again; it may have been reclaimed by then."""
_STUCK_SECONDS = 1.0
_PAGE_BYTES = 4096

Touch = Callable[[int, int, int], None]
"""Takes a pid, an address and a number of bytes. Raises OSError."""


@dataclass(frozen=True, slots=True)
class _Request:
    pid: int
    address: int
    byte_count: int


@dataclass(slots=True)
class _OwnerQueue:
    """since: when its worker began with its current request."""

    waiting: deque[_Request] = field(default_factory=deque)
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class PagingLimits:
    """owners: that are served at once. requests: of one owner that wait. pages: whose last request is remembered."""

    owners: int = 16
    requests: int = 64
    pages: int = 4096


class PagingMetrics(NamedTuple):
    """touched, refused: requests since the daemon started. stuck: workers that have waited for more than a second."""

    touched: int
    refused: int
    stuck: int


class Paging:
    """request() is called from one thread and never blocks; metrics() from any."""

    def __init__(
        self,
        touch: Touch,
        owner_of: Callable[[int], int],
        local_bytes: Callable[[int, int], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        limits: PagingLimits = PagingLimits(),
    ) -> None:
        """owner_of: returns a pid's uid, without blocking. local_bytes: returns how many bytes of a pid's memory may be
        touched from an address on; may block.
        """
        self._touch = touch
        self._owner_of = owner_of
        self._local_bytes = local_bytes
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._queues: dict[int, _OwnerQueue] = {}
        self._lately: OrderedDict[tuple[int, int], float] = OrderedDict()
        self._touched = self._refused = 0

    def request(self, pid: int, address: int, byte_count: int) -> None:
        """Have memory of a process brought in, unless too many requests of its owner wait already."""
        page, now = (pid, address // _PAGE_BYTES), self._clock()
        if now - self._lately.get(page, -_AGAIN_SECONDS) < _AGAIN_SECONDS:
            return
        self._lately[page] = now
        self._lately.move_to_end(page)
        if len(self._lately) > self._limits.pages:
            self._lately.popitem(last=False)
        owner = self._owner_of(pid)
        with self._lock:
            queue = self._queues.get(owner)
            if queue is None and len(self._queues) >= self._limits.owners:
                self._refused += 1
                return
            if queue is not None:
                if len(queue.waiting) >= self._limits.requests:
                    self._refused += 1
                else:
                    queue.waiting.append(_Request(pid, address, byte_count))
                return
            queue = self._queues[owner] = _OwnerQueue(deque([_Request(pid, address, byte_count)]), now)
        # a daemon thread, so that the process can exit while it waits
        worker = threading.Thread(target=self._work, args=(owner, queue), name="stapsdtd-paging", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:
            # too many threads; without its queue, the owner's next request tries again
            _log.warning("cannot bring in memory that hits did not find: %s", error)
            with self._lock:
                del self._queues[owner]
                self._refused += 1

    def metrics(self) -> PagingMetrics:
        now = self._clock()
        with self._lock:
            stuck = sum(now - queue.since > _STUCK_SECONDS for queue in self._queues.values())
            return PagingMetrics(self._touched, self._refused, stuck)

    def _work(self, owner: int, queue: _OwnerQueue) -> None:
        while True:
            with self._lock:
                if not queue.waiting:
                    del self._queues[owner]
                    return
                request = queue.waiting.popleft()
                queue.since = self._clock()
            try:
                self._bring_in(request)
            except Exception:  # noqa: BLE001 - the owner's other pages must come, too
                _log.exception("pid %d: cannot bring in memory at %#x", request.pid, request.address)

    def _bring_in(self, request: _Request) -> None:
        try:
            local_bytes = self._local_bytes(request.pid, request.address)
            if not local_bytes:
                with self._lock:
                    self._refused += 1
                return
            self._touch(request.pid, request.address, min(request.byte_count, local_bytes))
        except OSError as error:
            # the process may be gone, or the address invalid
            _log.debug("pid %d: cannot bring in memory at %#x: %s", request.pid, request.address, error)
        else:
            with self._lock:
                self._touched += 1
