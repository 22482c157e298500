"""Takes events away in a thread of its own: the kernel waits some 100 ms for each, and nobody else needs to.

Those that somebody waits for come first. The others are of objects that came and went, and a user can have many come
and go.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue

from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.probe_events import ProbeEvent

_log = logging.getLogger(__name__)


class Removals:
    """Called from one thread."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "stapsdtd-removals")
        self._gone: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._line: list[tuple[bool, int, Callable[[], None]]] = []
        self._refused: list[ProbeEvent] = []

    def begin(self, event: ProbeEvent, gone: Callable[[], None], *, is_awaited: bool = True) -> None:
        """Remove an event that no slot goes by any more; gone is for what may be used again then, see collect()."""
        self._put(lambda: self._remove(event, gone), is_awaited=is_awaited)

    def try_again(self) -> None:
        """Remove what the kernel refused to remove, which patches nobody and is merely there."""
        with self._lock:
            refused, self._refused = self._refused, []
        for event in refused:
            self._put(partial(self._remove_again, event), is_awaited=False)

    @property
    def waiting(self) -> int:
        """How many are still to be removed."""
        return len(self._line)

    def _put(self, work: Callable[[], None], *, is_awaited: bool) -> None:
        with self._lock:
            heapq.heappush(self._line, (not is_awaited, next(self._numbers), work))
        self._worker.submit(self._do_next)

    def _do_next(self) -> None:
        with self._lock:
            _, _, work = heapq.heappop(self._line)
        work()

    def _remove(self, event: ProbeEvent, gone: Callable[[], None]) -> None:
        try:
            event.remove()
        except TracefsRejectedError as error:
            _log.warning("%s; it is tried again, by the next start at the latest", error)
            with self._lock:
                self._refused.append(event)
        except Exception:  # noqa: BLE001 - the others are to go as well
            _log.exception("an event could not be removed")
        self._gone.put(gone)

    def _remove_again(self, event: ProbeEvent) -> None:
        try:
            event.remove()
        except TracefsRejectedError as error:
            _log.debug("%s; it is tried again", error)
            with self._lock:
                self._refused.append(event)

    def collect(self) -> None:
        """Run in the caller's thread what was to be done when events are gone, of those that are."""
        for gone in self._finished():
            gone()

    def _finished(self) -> Iterator[Callable[[], None]]:
        while True:
            try:
                yield self._gone.get_nowait()
            except Empty:
                return

    def settled(self) -> Future[None]:
        """Answer what is done when all that was begun so far, and is awaited, is gone."""
        done: Future[None] = Future()
        self._put(lambda: done.set_result(None), is_awaited=True)
        return done

    def finish(self) -> None:
        """Wait until all are gone, but for what the kernel refuses to the end."""
        self._worker.shutdown()
        refused, self._refused = self._refused, []
        for event in refused:
            self._remove_again(event)
        self.collect()
