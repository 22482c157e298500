"""Evaluates on events what no engine tests at hits, and adds up rows, in a thread of its own, for clients in turn.

    reader thread ──► Backlog.add        client A   slice, slice, slice ──┐
                      (what has no       client B   slice ────────────────┴──► one thread ──► EventLog, Table
                      room is lost)

Clients and the programs that they trace decide how long that takes. So events are evaluated in slices of some 3 ms, one
of each client in turn, and nobody else's events wait for them: the thread that reads all events only fills backlogs.
Beside others, a client gets a share of one processor, see `runtime.shares`. Of each client's events, a bounded number
of bytes waits; those beyond are lost to that client.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from stapsdtd.aggregate.aggregation import Key, Row
from stapsdtd.capture.engine import ManyRows
from stapsdtd.events.batch import EventBatch
from stapsdtd.runtime.futures import finished, unfinished
from stapsdtd.runtime.shares import LOOK_SECONDS, Shares
from stapsdtd.runtime.slices import slices
from stapsdtd.sessions.fairness import shared_out

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
    """waiting: the backlogs that have something."""

    bytes: int = 0
    waiting: deque[Backlog] = field(default_factory=deque)


class Evaluating:
    """Owns the thread. Any thread may call the methods. slices: see `runtime.slices`."""

    def __init__(self, shares: Shares) -> None:
        self.slices = slices()
        self._shares = shares
        self._changed = threading.Condition()
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._asked: list[Future[None]] = []
        self._is_resting = self._is_hurried = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="stapsdtd-evaluating", daemon=True)
        self._thread.start()

    def began(self, client: str) -> None:
        """Count a subscription of a client's."""
        self._shares.began(client)

    def ended(self, client: str) -> None:
        self._shares.ended(client)
        with self._changed:
            self._changed.notify()

    def backlog(self, client: str, steps_per_byte: int) -> Backlog:
        return Backlog(self, client, max(_STEPS_PER_SLICE // steps_per_byte, 1))

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
            begin = self._shares.cpu_clock()
            freed = backlog.take_turn()
            seconds = self._shares.cpu_clock() - begin
            self.slices.observe(seconds)
            self._shares.charge(backlog.client, "evaluating", seconds)
            self._account(backlog, freed)
            # what it refers to is not to be kept until the next one comes
            del backlog

    def _next(self) -> Backlog | None:
        """Wait for a backlog whose turn it is. None if there is none, and the thread is to end."""
        with self._changed:
            while True:
                for asked in self._asked:
                    asked.set_result(None)
                self._asked.clear()
                waiting = {
                    name: self._seconds_to_wait(name) for name, client in self._clients.items() if client.waiting
                }
                if not waiting and self._is_stopping:
                    return None
                if (name := next((name for name, seconds in waiting.items() if not seconds), None)) is not None:
                    self._clients.move_to_end(name)
                    return self._clients[name].waiting[0]
                self._is_resting = True
                self._changed.wait(min(*waiting.values(), LOOK_SECONDS) if waiting else None)
                self._is_resting = False

    def _seconds_to_wait(self, client: str) -> float:
        return 0.0 if self._is_hurried else self._shares.seconds_to_wait(client)

    def _account(self, backlog: Backlog, freed: int) -> None:
        with self._changed:
            client = self._clients[backlog.client]
            client.bytes -= freed
            client.waiting.popleft()
            if not backlog.is_empty:
                client.waiting.append(backlog)
            elif not client.waiting:
                del self._clients[backlog.client]


class Backlog:
    """A clause's events and rows that are still to be evaluated, in the order in which they came."""

    def __init__(self, thread: Evaluating, client: str, slice_bytes: int) -> None:
        """slice_bytes: how much is evaluated at a time, but at least one event."""
        self.client = client
        self._thread = thread
        self._slice_bytes = slice_bytes
        self._items: deque[_Slices | Parts | Future[None]] = deque()

    def add(self, batch: EventBatch, evaluation: Evaluation) -> int:
        """Take events, of each process as many as there is room for. Return how many had none. Called by one thread."""
        room, nbytes = self._thread.room(self.client), batch.nbytes
        fitting = room * len(batch) // nbytes
        if fitting <= 0:
            return len(batch)
        kept = shared_out(batch, fitting)
        self._put(_Slices(kept, evaluation, self._slice_bytes))
        return len(batch) - len(kept)

    def add_rows(self, parts: Parts) -> None:
        """Take rows, which keep what room they had in the kernel until they are added up."""
        self._put(parts)

    def settled(self) -> Future[None]:
        """Return a future that is done, in any thread, when all events and rows so far were evaluated."""
        if self.is_empty:
            return finished()
        done = unfinished()
        self._put(done)
        return done

    def _put(self, item: _Slices | Parts | Future[None]) -> None:
        nbytes = 0 if isinstance(item, Future) else item.nbytes
        self._thread.put(self, partial(self._items.append, item), nbytes)

    @property
    def is_empty(self) -> bool:
        return not self._items

    def take_turn(self) -> int:
        """Evaluate a slice. Return how many bytes need no room any more. Called by the thread."""
        item, freed = self._items[0], 0
        if not isinstance(item, Future):
            if not item.take_turn():
                return 0
            self._items.popleft()
            freed = item.nbytes
        while self._items and isinstance(settled := self._items[0], Future):
            self._items.popleft()
            settled.set_result(None)
        return freed


class _Slices:
    """A batch that is evaluated in slices."""

    def __init__(self, batch: EventBatch, evaluation: Evaluation, slice_bytes: int) -> None:
        self.nbytes = batch.nbytes
        self._batch = batch
        self._evaluation = evaluation
        self._slices = _slices(batch, slice_bytes)
        self._left: list[EventBatch] = []

    def take_turn(self) -> bool:
        """Evaluate the next slice, and return whether it was the last one."""
        begin, end = next(self._slices)
        if (left := self._evaluation.evaluate(self._batch.slice(begin, end))) is not None:
            self._left.append(left)
        if end < len(self._batch):
            return False
        if self._left:
            self._evaluation.keep(self._left)
        return True


class _RowSink(Protocol):
    """See `EventSink`."""

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None: ...

    def write_off(self, count: int) -> None: ...


class Parts:
    """Rows that are decoded and added up in parts. nbytes: of a client's events."""

    nbytes = 0

    def __init__(self, rows: ManyRows, sink: _RowSink) -> None:
        self._rows = rows
        self._left = rows.hits
        self._parts = rows.parts()
        self._sink = sink

    def take_turn(self) -> bool:
        """Add up the next part, and return whether there is no other one."""
        try:
            hits, part = next(self._parts)
            for site_id, rows in part.items():
                self._sink.aggregated(site_id, rows)
        except StopIteration:
            return True
        except Exception:  # noqa: BLE001 - other rows are to be added up nevertheless
            self._rows.drop()
            self._sink.write_off(self._left)
            return True
        self._left -= hits
        if self._left:
            return False
        self._rows.drop()
        return True


def _slices(batch: EventBatch, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield from where to where each slice goes."""
    count = len(batch)
    if count <= _ROWS_PER_SLICE and batch.nbytes <= slice_bytes:
        return iter([(0, count)])
    slice_of = np.maximum((np.cumsum(batch.row_bytes()) - 1) // slice_bytes, np.arange(count) // _ROWS_PER_SLICE)
    cuts = (np.flatnonzero(np.diff(slice_of)) + 1).tolist()
    return pairwise([0, *cuts, count])
