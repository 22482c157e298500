"""Ends plans.

    no slot names it ──► no hit can be using it ──► its records are read ──► its room is allocated again
                         (a grace period)           (Reader.end)             (collect)

A hit that began before the slot was switched goes on by the old plan, however long the kernel holds it up. So a plan's
room must not be reused after a mere delay: the hit would act by somebody else's plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from stapsdtd.capture.bpf.reading import ActivePlan, Channel

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_RETRY_SECONDS = 1.0


class Ends(Protocol):
    """`Reader.end`."""

    def __call__(self, plans: Sequence[ActivePlan], closing: Sequence[Channel]) -> Future[None]: ...


@dataclass(frozen=True, slots=True)
class _Ending:
    plans: tuple[ActivePlan, ...]
    closing: tuple[Channel, ...]
    done: Future[None] = field(default_factory=Future)


class Endings:
    """begin() and collect() are called from one thread, and do not block."""

    def __init__(self, wait_for_hits: Callable[[], None], end: Ends, retry_seconds: float = _RETRY_SECONDS) -> None:
        """wait_for_hits: returns when all hits that had begun are over."""
        self._wait_for_hits = wait_for_hits
        self._end = end
        self._retry_seconds = retry_seconds
        self._begun: SimpleQueue[_Ending | None] = SimpleQueue()
        self._ended: SimpleQueue[ActivePlan] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stapsdtd-endings", daemon=True)
        self._thread.start()

    def begin(self, plans: Sequence[ActivePlan], closing: Sequence[Channel] = ()) -> Future[None]:
        """End plans that no slot names any more, and close channels, which receive nothing once their plans ended.

        The future is done when all their events have been delivered; futures get done in the order of the calls.
        """
        ending = _Ending(tuple(plans), tuple(closing))
        # callers that stop waiting must not cancel it
        ending.done.set_running_or_notify_cancel()
        self._begun.put(ending)
        return ending.done

    def collect(self) -> list[ActivePlan]:
        """Return the plans that have ended since the last call, whose room may be freed."""
        return _drained(self._ended)

    def finish(self) -> None:
        """Wait until all that was begun has ended, and stop the thread."""
        self._begun.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            first = self._begun.get()
            # all that came meanwhile share one grace period
            batch = [first, *_drained(self._begun)]
            endings = [ending for ending in batch if ending is not None]
            plans = [plan for ending in endings for plan in ending.plans]
            if plans:
                self._wait()
            ended = self._end(plans, [channel for ending in endings for channel in ending.closing])
            ended.add_done_callback(partial(self._finish, endings))
            if None in batch:
                wait([ended])
                return

    def _wait(self) -> None:
        while True:
            try:
                self._wait_for_hits()
            except OSError as error:
                _log.warning("cannot wait until hits have left an old plan, trying again: %s", error)
                time.sleep(self._retry_seconds)
            else:
                return

    def _finish(self, endings: Sequence[_Ending], _: Future[None]) -> None:
        for ending in endings:
            for plan in ending.plans:
                self._ended.put(plan)
            ending.done.set_result(None)


def _drained(queue: SimpleQueue[_T]) -> list[_T]:
    items = []
    while True:
        try:
            items.append(queue.get_nowait())
        except Empty:
            return items
