"""Removes events in a thread of its own, since the kernel takes some 100 ms for each. `turns` decides on the order.

More threads would not help where closing an event's last descriptor holds the kernel's event_mutex all the while. The
others, links, are closed by `LinkCloser`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue

from stapsdtd.capture.bpf.armed import Event
from stapsdtd.capture.bpf.link_closer import LinkCloser
from stapsdtd.capture.bpf.turns import MAX_WAITING, Turns
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.runtime.futures import all_done, unfinished

_log = logging.getLogger(__name__)


class EventReaper:
    """Called from one thread.

    owner: on whose behalf an event is removed, such as "objects of uid 1000".
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        worker: Executor | None = None,
        links: LinkCloser | None = None,
    ) -> None:
        """worker: does one thing at a time; a thread of its own if None."""
        self._worker = worker or ThreadPoolExecutor(1, "stapsdtd-reaper")
        self._links = links or LinkCloser()
        self._on_gone: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._changed = threading.Condition()
        self._turns = Turns[Work](clock)
        self._removing: str | None = None
        self._held: dict[str, list[Callable[[], None]]] = {}
        self._refused: list[tuple[str, Event]] = []
        self._is_arming = False
        self._is_finishing = False

    def begin(
        self,
        event: Event,
        on_gone: Callable[[], None],
        *,
        owner: str = "",
        is_awaited: bool = True,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to remove an event that no slot refers to. on_gone: called by collect() once no hit of it can come.

        before: called before its processes are unpatched, in any thread and maybe more than once.
        """
        work = Work(owner, partial(self._remove, owner, event, on_gone, before), event, before)
        self._once_let(owner, partial(self._put, owner, work, is_awaited=is_awaited))

    def try_again(self) -> None:
        """Try again to remove events that the kernel refused to remove. They patch nobody any more."""
        with self._changed:
            refused, self._refused = self._refused, []
        for owner, event in refused:
            self._put(owner, Work(owner, partial(self._remove_again, owner, event), event), is_awaited=False)

    def why_not(self, owner: str, limit: int = MAX_WAITING) -> str | None:
        """Return why no more should be armed that will be removed for this owner, or None if it may be."""
        with self._changed:
            waiting, allowed = self._turns.count(owner), min(limit, self._turns.share)
        waiting += self._links.count(owner)
        if waiting < allowed:
            return None
        return f"{owner} come and go faster than the kernel removes events: {waiting} wait"

    @contextmanager
    def arming(self, owner: str) -> Iterator[None]:
        """Remove nothing during the block. Owners whose objects come and go often wait for a moment longer."""
        with self._changed:
            self._is_arming = True
            self._turns.armed(owner)
        try:
            yield
        finally:
            with self._changed:
                self._is_arming = False
                self._changed.notify_all()

    @contextmanager
    def together(self, owner: str) -> Iterator[None]:
        """Begin what is begun for an owner during the block when it ends, so that links share a grace period.

        Of several blocks at the same time, the first that ends begins what was begun in all of them.
        """
        with self._changed:
            self._held.setdefault(owner, [])
        try:
            yield
        finally:
            self._let(owner)

    def _once_let(self, owner: str, call: Callable[[], None]) -> None:
        """Do something now, or when a block of `together` ends."""
        with self._changed:
            if (held := self._held.get(owner)) is not None:
                held.append(call)
                return
        call()

    def _let(self, owner: str) -> None:
        with self._changed:
            held = self._held.pop(owner, [])
        for call in held:
            call()

    def _put(self, owner: str, work: Work, *, is_awaited: bool) -> None:
        if work.is_link:
            self._links.begin(owner, work.run)
            return
        with self._changed:
            self._turns.put(owner, work, is_awaited=is_awaited)
            self._changed.notify_all()
        self._worker.submit(self._do_next)

    def _do_next(self) -> None:
        with self._changed:
            while (work := self._next()) is None:
                self._changed.wait(None if self._is_arming else max(self._turns.wait, 0.001))
            self._removing = work.owner
        work.run()
        with self._changed:
            self._removing = None
            waiting = [other for other in self._turns.awaited() if other.is_patched]
        # unpatch their processes long before their turns come
        for other in waiting:
            self._wait_for_arming()
            other.unpatch()

    def _next(self) -> Work | None:
        return None if self._is_arming else self._turns.take(is_last=self._is_finishing)

    def _wait_for_arming(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_arming)

    def _remove(self, owner: str, event: Event, on_gone: Callable[[], None], before: Callable[[], None]) -> None:
        try:
            before()
            event.disarm()
        except Exception:  # noqa: BLE001 - the others must go, too
            # on_gone is not called, since late hits may still come
            _log.exception("cannot disarm an event; the next start of the daemon will remove it")
            return
        try:
            if event.holds_event_mutex:
                # the rest, for which an arming would wait
                self._wait_for_arming()
            event.remove()
        except TracefsRejectedError as error:
            _log.warning("%s; trying again later, at the latest when the daemon starts next", error)
            with self._changed:
                self._refused.append((owner, event))
        except Exception:  # noqa: BLE001 - the others must go, too
            _log.exception("cannot remove an event; the next start of the daemon will")
        self._on_gone.put(on_gone)

    def _remove_again(self, owner: str, event: Event) -> None:
        try:
            event.remove()
        except TracefsRejectedError as error:
            _log.debug("%s; trying again later", error)
            with self._changed:
                self._refused.append((owner, event))

    def collect(self) -> None:
        """Call on_gone of the events that are gone, in the caller's thread."""
        for on_gone in self._finished():
            on_gone()

    def _finished(self) -> Iterator[Callable[[], None]]:
        while True:
            try:
                yield self._on_gone.get_nowait()
            except Empty:
                return

    def quiesced(self, owner: str = "") -> Future[None]:
        """Return a future that is done when the events begun so far for this owner with is_awaited are gone."""
        gone = unfinished()
        self._once_let(owner, partial(self._settle, owner, gone))
        return gone

    def _settle(self, owner: str, gone: Future[None]) -> None:
        waited = self._links.pending(owner)
        with self._changed:
            has_events = bool(self._turns.count(owner)) or self._removing == owner
        if has_events:
            turn: Future[None] = Future()
            waited.append(turn)
            self._put(owner, Work(owner, partial(turn.set_result, None)), is_awaited=True)
        all_done(waited).add_done_callback(lambda _: gone.set_result(None))

    def finish(self) -> None:
        """Wait until all events are gone, except those that the kernel still refuses to remove."""
        with self.arming(""):
            for owner in list(self._held):
                self._let(owner)
            with self._changed:
                self._is_finishing = True
                waiting = self._turns.items()
            # now, since it takes long until the last one's turn comes
            for work in waiting:
                work.unpatch()
        self._worker.shutdown()
        self._links.finish()
        refused, self._refused = self._refused, []
        for owner, event in refused:
            self._remove_again(owner, event)
        self.collect()


class Work:
    """What is to be done for an owner. event: is removed by it.

    is_link: it removes an event that holds no event_mutex. is_patched: the event is still to be unpatched before its
    turn.
    """

    def __init__(
        self,
        owner: str,
        run: Callable[[], None],
        event: Event | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """before: called before the event is unpatched."""
        self.owner = owner
        self.run = run
        self.is_link = event is not None and not event.holds_event_mutex
        self.is_patched = event is not None and not self.is_link
        self._event = event
        self._before = before

    def unpatch(self) -> None:
        if not self.is_patched:
            return
        self.is_patched = False
        if self._event is not None:
            self._before()
            try:
                self._event.unpatch()
            except OSError:
                _log.exception("cannot close a probe's perf event")
