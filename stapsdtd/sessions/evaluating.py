"""Evaluates on events what no engine tests at hits, in a thread of its own, for clients in turn.

    reader thread ──► Backlog.add        client A   slice, slice, slice ──┐
                      (what has no       client B   slice ────────────────┴──► one thread ──► EventLog, Table
                      room is lost)

Clients and the programs that they trace decide how long that takes. So events are evaluated in slices of some 3 ms, one
of each client in turn, and nobody else's events wait for them: the thread that reads all events only fills backlogs.
While others have subscriptions, a client gets a share of one processor, of which it may take a second's worth at once.
Of each client's events, a bounded number of bytes waits; those beyond are lost to that client.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from stapsdtd.events.batch import EventBatch
from stapsdtd.runtime.futures import finished, unfinished
from stapsdtd.runtime.slices import slices
from stapsdtd.sessions.fairness import shared_out

SHARE = 0.25
MOST_WAITING_BYTES = 16 << 20
"""Of a client's events."""

_STEPS_PER_SLICE = 12 << 20
"""Some 0.25 ns each: see `query.evaluate.steps`."""
_ROWS_PER_SLICE = 6144


class Evaluation(Protocol):
    """What is done with a clause's events. Neither method raises."""

    def evaluate(self, batch: EventBatch) -> EventBatch | None:
        """Return what is left of a slice for the log, None if nothing is."""

    def keep(self, batches: Sequence[EventBatch]) -> None:
        """Put what slices of one batch left into the log."""


@dataclass(slots=True, eq=False)
class _Client:
    """paid_until: when its share has made up for the time that it took. waiting: the backlogs that have something."""

    bytes: int = 0
    paid_until: float = 0.0
    waiting: deque[Backlog] = field(default_factory=deque)


class Evaluating:
    """Owns the thread. Any thread may call the methods. clock: in seconds; cpu_clock: of the calling thread's work.
    slices: see `runtime.slices`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self.slices = slices()
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._changed = threading.Condition()
        self._subscriptions: Counter[str] = Counter()
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._asked: list[Future[None]] = []
        self._is_resting = self._is_hurried = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="stapsdtd-evaluating", daemon=True)
        self._thread.start()

    def began(self, client: str) -> None:
        """Count a subscription of a client's."""
        with self._changed:
            self._subscriptions[client] += 1

    def ended(self, client: str) -> None:
        with self._changed:
            self._subscriptions[client] -= 1
            self._subscriptions += Counter()
            self._changed.notify()

    def backlog(self, client: str, steps_per_byte: int, evaluation: Evaluation) -> Backlog:
        return Backlog(self, client, evaluation, max(_STEPS_PER_SLICE // steps_per_byte, 1))

    def hurry(self) -> None:
        """Let nobody's events wait for a share any more: the daemon stops."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify()

    def ask(self) -> Future[None]:
        """Return a future that is done once the thread comes to it, before the next slice."""
        with self._changed:
            if self._is_resting:
                return finished()
            asked = unfinished()
            self._asked.append(asked)
            self._changed.notify()
            return asked

    def stop(self) -> None:
        """Return when all that waits was evaluated."""
        with self._changed:
            self._is_hurried = self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def room(self, client: str) -> int:
        """Return how many bytes of a client's events may come to those that wait."""
        with self._changed:
            known = self._clients.get(client)
            return MOST_WAITING_BYTES - (known.bytes if known else 0)

    def put(self, backlog: Backlog, append: Callable[[], None], nbytes: int) -> None:
        """Have a backlog take its turns. append: gives it something more. nbytes: of events."""
        with self._changed:
            append()
            client = self._clients.setdefault(backlog.client, _Client())
            client.bytes += nbytes
            if backlog not in client.waiting:
                client.waiting.append(backlog)
            self._changed.notify()

    def _run(self) -> None:
        while (backlog := self._next()) is not None:
            begin = self._cpu_clock()
            freed = backlog.take_turn()
            seconds = self._cpu_clock() - begin
            self.slices.observe(seconds)
            self._account(backlog, freed, seconds)
            # what it refers to is not to be kept until the next one comes
            del backlog

    def _next(self) -> Backlog | None:
        """Wait for a backlog whose turn it is. None if there is none, and the thread is to end."""
        with self._changed:
            while True:
                for asked in self._asked:
                    asked.set_result(None)
                self._asked.clear()
                waiting = [client for client in self._clients.values() if client.waiting]
                if not waiting and self._is_stopping:
                    return None
                if (backlog := self._turn()) is not None:
                    return backlog
                self._is_resting = True
                self._changed.wait(min(map(self._seconds_until_paid, waiting)) if waiting else None)
                self._is_resting = False

    def _turn(self) -> Backlog | None:
        for name, client in self._clients.items():
            if client.waiting and (self._is_alone(name) or self._seconds_until_paid(client) <= 0):
                self._clients.move_to_end(name)
                return client.waiting[0]
        return None

    def _is_alone(self, name: str) -> bool:
        return self._is_hurried or not any(other != name for other in self._subscriptions)

    def _seconds_until_paid(self, client: _Client) -> float:
        """A second's worth may be taken in advance."""
        return client.paid_until - self._clock() - 1

    def _account(self, backlog: Backlog, freed: int, seconds: float) -> None:
        with self._changed:
            client = self._clients[backlog.client]
            now = self._clock()
            client.bytes -= freed
            client.paid_until = max(client.paid_until, now) + seconds / SHARE
            client.waiting.popleft()
            if not backlog.is_empty:
                client.waiting.append(backlog)
            elif not client.waiting and client.paid_until < now + 1 and backlog.client not in self._subscriptions:
                del self._clients[backlog.client]


class Backlog:
    """A clause's events that are still to be evaluated, in the order in which they came."""

    def __init__(self, thread: Evaluating, client: str, evaluation: Evaluation, slice_bytes: int) -> None:
        """slice_bytes: how much is evaluated at a time, but at least one event."""
        self.client = client
        self._thread = thread
        self._evaluation = evaluation
        self._slice_bytes = slice_bytes
        self._items: deque[_Slices | Future[None]] = deque()

    def add(self, batch: EventBatch) -> int:
        """Take events, of each process as many as there is room for. Return how many had none. Called by one thread."""
        room, nbytes = self._thread.room(self.client), batch.nbytes
        fitting = room * len(batch) // nbytes
        if fitting <= 0:
            return len(batch)
        kept = shared_out(batch, fitting)
        self._put(_Slices(kept, self._slice_bytes))
        return len(batch) - len(kept)

    def settled(self) -> Future[None]:
        """Return a future that is done, in any thread, when all events so far were evaluated."""
        if self.is_empty:
            return finished()
        done = unfinished()
        self._put(done)
        return done

    def _put(self, item: _Slices | Future[None]) -> None:
        nbytes = item.nbytes if isinstance(item, _Slices) else 0
        self._thread.put(self, partial(self._items.append, item), nbytes)

    @property
    def is_empty(self) -> bool:
        return not self._items

    def take_turn(self) -> int:
        """Evaluate a slice. Return how many bytes need no room any more. Called by the thread."""
        item, freed = self._items[0], 0
        if isinstance(item, _Slices):
            if not item.take_turn(self._evaluation):
                return 0
            self._items.popleft()
            freed = item.nbytes
        while self._items and isinstance(settled := self._items[0], Future):
            self._items.popleft()
            settled.set_result(None)
        return freed


class _Slices:
    """A batch that is evaluated in slices."""

    def __init__(self, batch: EventBatch, slice_bytes: int) -> None:
        self.nbytes = batch.nbytes
        self._batch = batch
        self._slices = _slices(batch, slice_bytes)
        self._left: list[EventBatch] = []

    def take_turn(self, evaluation: Evaluation) -> bool:
        """Evaluate the next slice, and return whether it was the last one."""
        begin, end = next(self._slices)
        if (left := evaluation.evaluate(self._batch.slice(begin, end))) is not None:
            self._left.append(left)
        if end < len(self._batch):
            return False
        if self._left:
            evaluation.keep(self._left)
        return True


def _slices(batch: EventBatch, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield from where to where each slice goes."""
    count = len(batch)
    if count <= _ROWS_PER_SLICE and batch.nbytes <= slice_bytes:
        return iter([(0, count)])
    slice_of = np.maximum((np.cumsum(batch.row_bytes()) - 1) // slice_bytes, np.arange(count) // _ROWS_PER_SLICE)
    cuts = (np.flatnonzero(np.diff(slice_of)) + 1).tolist()
    return pairwise([0, *cuts, count])
