"""A thread that serves several queues in turn, for calls that may block.

    queue "anne"   work, work, work ──┐
    queue "bert"   work ──────────────┼──► one thread, one piece of work from each queue in turn
    queue ""       work ──────────────┘

Callers get futures and wait for nothing, so a call that does not return delays the work behind it and nobody else.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Backlog:
    """waiting: pieces of work that have not begun. running: the name of the one that has, "" if none has one.
    seconds: how long it has been running.
    """

    waiting: int = 0
    running: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class _Work(Generic[_T]):
    name: str
    call: Callable[[], _T]
    result: Future[_T]

    def run(self) -> None:
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self.result.set_exception(error)
        else:
            self.result.set_result(result)


class FairThread:
    """All methods may be called from any thread."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._queues: OrderedDict[Hashable, deque[_Work[object]]] = OrderedDict()
        self._waiting = 0
        self._running = ""
        self._since = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, queue: Hashable, call: Callable[[], _T], name: str = "") -> Future[_T]:
        """Have the thread make a call, after those submitted to the same queue before. The future can be cancelled
        until the call begins. name: for Backlog.running. Raises RuntimeError after stop().
        """
        work = _Work(name, call, Future())
        with self._changed:
            if self._is_stopping:
                raise RuntimeError("the thread is stopping")
            self._queues.setdefault(queue, deque()).append(work)  # type: ignore[arg-type]
            self._waiting += 1
            self._changed.notify()
        return work.result

    def ask(self) -> Future[None]:
        """Return a future that is done once the thread comes to it."""
        return self.submit(self, lambda: None)

    def backlog(self) -> Backlog:
        with self._changed:
            seconds = self._clock() - self._since if self._running else 0.0
            return Backlog(self._waiting, self._running, seconds)

    def stop(self) -> None:
        """Return when everything submitted so far is done."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if work.result.set_running_or_notify_cancel():
                work.run()
            # its result may be large, and the next work may take long to come
            del work

    def _next(self) -> _Work[object] | None:
        with self._changed:
            self._running = ""
            while not self._queues:
                if self._is_stopping:
                    return None
                self._changed.wait()
            key, queue = self._queues.popitem(last=False)
            work = queue.popleft()
            if queue:
                self._queues[key] = queue
            self._waiting -= 1
            self._running, self._since = work.name, self._clock()
            return work
