"""Closes links, each in a thread that waits for the kernel's grace period.

Nobody else waits for a link that is closed: no event_mutex is held, and those that are closed at the same time share a
grace period. So they are closed as soon as they come, beside everything else, some of each owner at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from stapsdtd.runtime.futures import unfinished

_THREADS = 128
_TOGETHER = 32
"""Of one owner's links: four owners with any number of them leave no other one waiting for a thread."""


class _Closing(NamedTuple):
    close: Callable[[], None]
    done: Future[None]


@dataclass(slots=True)
class _Line:
    """Of one owner's links. pending: also those that have a thread already."""

    waiting: deque[_Closing] = field(default_factory=deque)
    pending: set[Future[None]] = field(default_factory=set)


class LinkCloser:
    """Usable from any thread."""

    def __init__(self, threads: Executor | None = None) -> None:
        """threads: a pool of its own if None."""
        self._threads = threads or ThreadPoolExecutor(_THREADS, "stapsdtd-links")
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}

    def begin(self, owner: str, close: Callable[[], None]) -> None:
        """Begin to close a link. close: called in a thread in which it may wait; it raises nothing."""
        closing = _Closing(close, unfinished())
        with self._lock:
            line = self._lines.setdefault(owner, _Line())
            line.pending.add(closing.done)
            if len(line.pending) > _TOGETHER:
                line.waiting.append(closing)
                return
        self._threads.submit(self._close, owner, closing)

    def _close(self, owner: str, closing: _Closing) -> None:
        closing.close()
        with self._lock:
            line = self._lines[owner]
            line.pending.discard(closing.done)
            following = line.waiting.popleft() if line.waiting else None
            if not line.pending:
                del self._lines[owner]
        if following is not None:
            # behind what others wait for
            self._threads.submit(self._close, owner, following)
        closing.done.set_result(None)

    def count(self, owner: str) -> int:
        """Return how many of an owner's links are not closed yet."""
        with self._lock:
            line = self._lines.get(owner)
            return len(line.pending) if line else 0

    def pending(self, owner: str) -> list[Future[None]]:
        """Return futures of an owner's links that are not closed yet, which are done once they are."""
        with self._lock:
            line = self._lines.get(owner)
            return list(line.pending) if line else []

    def finish(self) -> None:
        """Wait until all are closed. None may be begun from then on."""
        with self._lock:
            pending = [closed for line in self._lines.values() for closed in line.pending]
        for closed in pending:
            closed.result()
        self._threads.shutdown()
