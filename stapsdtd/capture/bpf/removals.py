"""Takes events away in a thread of its own: the kernel waits some 100 ms for each, and nobody else needs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue

from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.probe_events import ProbeEvent

_log = logging.getLogger(__name__)


class Removals:
    """Called from one thread."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "stapsdtd-removals")
        self._gone: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def begin(self, event: ProbeEvent, gone: Callable[[], None]) -> None:
        """Remove an event that no slot goes by any more; gone is for what may be used again then, see collect()."""
        self._worker.submit(self._remove, event, gone)

    def _remove(self, event: ProbeEvent, gone: Callable[[], None]) -> None:
        try:
            event.remove()
        except TracefsRejectedError as error:
            _log.warning("%s; the next start removes it", error)
        except Exception:  # noqa: BLE001 - the others are to go as well
            _log.exception("an event could not be removed")
        self._gone.put(gone)

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
        """Answer what is done when all that was begun so far is gone."""
        return self._worker.submit(lambda: None)

    def finish(self) -> None:
        """Wait until all are gone."""
        self._worker.shutdown()
        self.collect()
