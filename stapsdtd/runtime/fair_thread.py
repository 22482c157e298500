"""A thread that serves several queues in turn, for calls that may block.

    urgent                     work ─────────────────┐
    client "a", user 1000      work, work, work ──┐  │
    client "a", user 1001      work ──────────────┴──┼──► one thread: urgent work first, then clients in turn,
    client "b", user 1000      work, work ───────────┘    and the users of a client in turn

Callers get futures and wait for nothing, so a call that does not return delays the work behind it and nobody else.
A toll charges clients for their turns, and makes those wait that take more than their share, see `runtime.shares`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from stapsdtd.runtime.futures import finished
from stapsdtd.runtime.shares import LOOK_SECONDS, Toll
from stapsdtd.runtime.slices import slices

_T = TypeVar("_T")


class Queue(NamedTuple):
    """Work for a client that is due to a user's processes; it is done in order."""

    client: str
    user: int | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """waiting: pieces of work that have not begun. running: the name of the one that has, "" if none has one.
    seconds: how long it has been running.
    """

    waiting: int = 0
    running: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work(Generic[_T]):
    """calls: the call to make, none once it was made or cancelled. client: None if the work is urgent."""

    name: str
    calls: list[Callable[[], _T]]
    result: Future[_T]
    client: str | None = None

    def run(self) -> None:
        try:
            result = self.calls.pop()()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self.result.set_exception(error)
            # the error refers to this frame: a cycle, of which only a garbage collection would dispose
            del self
        else:
            self.result.set_result(result)


class _Turns(Generic[_T]):
    """Steps that are taken one at a time. submit: has the next one taken. result: of the last one."""

    def __init__(
        self, steps: Generator[None, None, _T], submit: Callable[[Callable[[], None]], object], *, is_whole: bool
    ) -> None:
        self.result: Future[_T] = Future()
        self._steps = steps
        self._submit = submit
        self._is_whole = is_whole

    def take(self) -> None:
        result = self.result
        if result.cancelled() or (self._is_whole and not result.running() and not _begins(result)):
            return
        try:
            next(self._steps)
            self._submit(self.take)
        except StopIteration as end:
            if self._is_whole or _begins(result):
                result.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            if self._is_whole or _begins(result):
                result.set_exception(error)
            del self, result


class FairThread:
    """All methods may be called from any thread. slices: see `runtime.slices`, one for each call."""

    def __init__(self, name: str, toll: Toll | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._toll = toll
        self._clock = clock
        self.slices = slices()
        self._changed = threading.Condition()
        self._urgent: deque[_Work[object]] = deque()
        self._queues: OrderedDict[str, OrderedDict[Queue, deque[_Work[object]]]] = OrderedDict()
        self._waiting = 0
        self._running: _Work[object] | None = None
        self._since = 0.0
        self._is_resting = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, queue: Queue | None, call: Callable[[], _T], name: str = "") -> Future[_T]:
        """Have the thread make a call, after those submitted to the same queue before. The future can be cancelled
        until the call begins.

        queue: None for urgent work, which comes first. name: for Backlog.running. Raises RuntimeError after stop().
        """
        work = _Work(name, [call], Future(), queue.client if queue else None)
        work.result.add_done_callback(partial(self._drop, work.calls))
        with self._changed:
            if self._is_stopping:
                raise RuntimeError("the thread is stopping")
            if queue is None:
                self._urgent.append(work)  # type: ignore[arg-type]
            else:
                self._queues.setdefault(queue.client, OrderedDict()).setdefault(queue, deque()).append(work)  # type: ignore[arg-type]
            self._waiting += 1
            self._changed.notify()
        return work.result

    def take_turns(
        self, queue: Queue, steps: Generator[None, None, _T], name: str = "", *, is_whole: bool = False
    ) -> Future[_T]:
        """Have the thread take steps, each in a turn of its own, and return what they return in the end.

        Cancelling the future leaves out the rest. is_whole: it can be cancelled until the first step begins. Raises
        RuntimeError after stop(), which leaves out the rest as well.
        """
        turns = _Turns(steps, lambda take: self.submit(queue, take, name), is_whole=is_whole)
        self.submit(queue, turns.take, name)
        return turns.result

    def _drop(self, calls: list[Callable[[], _T]], _: Future[_T]) -> None:
        """Free what cancelled work refers to; its turn may be long in coming."""
        if calls:
            with self._changed:
                calls.clear()
                self._waiting -= 1

    def ask(self) -> Future[None]:
        """Return a future that is done once the thread comes to it, before all that is not urgent.

        A thread that has nothing to do is not woken up.
        """
        with self._changed:
            if self._is_resting and not self._urgent and not self._queues:
                return finished()
        return self.submit(None, lambda: None)

    def backlog(self, client: str | None = None) -> Backlog:
        """Return what there is to do. client: only for it."""
        with self._changed:
            waiting, running = self._waiting, self._running
            if client is not None:
                queues = self._queues.get(client, OrderedDict())
                # what was cancelled is not counted any more
                waiting = sum(bool(work.calls) for queue in queues.values() for work in queue)
            if running is None or client not in {None, running.client}:
                return Backlog(waiting)
            return Backlog(waiting, running.name, self._clock() - self._since)

    def waiting(self, queue: Queue) -> int:
        """Return how much work waits in a queue."""
        with self._changed:
            queues = self._queues.get(queue.client)
            return len(queues.get(queue, ())) if queues else 0

    def stop(self) -> None:
        """Return when everything submitted so far is done."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            begin = time.thread_time()
            work.run()
            seconds = time.thread_time() - begin
            self.slices.observe(seconds)
            if self._toll is not None and work.client is not None:
                self._toll.charge(work.client, seconds)
            # its result may be large, and the next work may take long to come
            del work

    def _next(self) -> _Work[object] | None:
        with self._changed:
            self._running = None
            while True:
                work, seconds = self._take_turn()
                if work is None:
                    if self._is_stopping:
                        return None
                    self._is_resting = True
                    self._changed.wait(seconds)
                    self._is_resting = False
                # what was cancelled is not counted any more
                elif work.result.set_running_or_notify_cancel():
                    self._waiting -= 1
                    self._running, self._since = work, self._clock()
                    return work

    def _take_turn(self) -> tuple[_Work[object] | None, float | None]:
        """Return whose turn it is; None, and when it may be somebody's, if it is nobody's at present."""
        if self._urgent:
            return self._urgent.popleft(), None
        soonest: float | None = None
        for client in self._queues:
            seconds = 0.0 if self._toll is None or self._is_stopping else self._toll.seconds_to_wait(client)
            if not seconds:
                return self._pop(client), None
            soonest = min(seconds, soonest or seconds, LOOK_SECONDS)
        return None, soonest

    def _pop(self, client: str) -> _Work[object]:
        queues = self._queues.pop(client)
        queue, waiting = queues.popitem(last=False)
        work = waiting.popleft()
        if waiting:
            queues[queue] = waiting
        if queues:
            self._queues[client] = queues
        return work


def _begins(result: Future[_T]) -> bool:
    """Report whether work was not cancelled, and can no longer be."""
    return result.set_running_or_notify_cancel()


def finish(steps: Generator[None, None, _T]) -> _T:
    """Take all steps at once, and return what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
