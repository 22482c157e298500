"""Reads the snapshots of a clause's aggregation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.aggregate.table import Table
from stapsdtd.api import snapshots, subscription_messages
from stapsdtd.api.stream import ClauseReader, StreamTurns
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.runtime.wall_clock import WallClock
from stapsdtd.sessions.clause import Clause
from stapsdtd.v1 import stapsdt_pb2 as pb

Collect = Callable[[SubscriptionKey], Future[int]]

_COLLECT_SECONDS = 1.0
_HUNG_SECONDS = 10.0
"""From when on it is assumed that the engine has failed."""
_MAX_SHARE = 0.2
"""Of the time, for one clause's snapshots: one of very many rows takes some 0.1 s."""


class SnapshotReader(ClauseReader):
    """Takes a snapshot at each interval, and one at the end. Without a stream, the next one covers the time between."""

    def __init__(
        self,
        clause: Clause,
        table: Table,
        aggregation: Aggregation,
        collect: Collect,
        turns: StreamTurns,
        *,
        from_number: int | None,
        wall_clock: WallClock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """from_number: of the first snapshot that the client lacks. collect: see `Engine.collect`."""
        super().__init__(clause)
        self._table = table
        self._aggregation = aggregation
        self._next_number = table.last.number + 1 if from_number is None else from_number
        self._collect = collect
        self._turns = turns
        self._wall_clock = wall_clock
        self._clock = clock
        # until when what fired is there; 0 if that is not known yet
        self._collected_ns = 0
        self._collecting: Future[int] | None = None
        self._asked = 0.0
        self._interval = aggregation.interval_ms / 1000
        self.due = clock() + self._interval if self._interval else None

    async def new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        for message in self._losses():
            yield message
        is_due = self.due is not None and self._clock() >= self.due and self._collected_ns > 0
        is_last = is_ended and not self._table.last.is_final
        begin = self._clock()
        for message in await self._turns.messages(self._unsent(is_taken=is_due or is_last, is_final=is_last)):
            yield message
        if self.due is not None and is_due:
            now = self._clock()
            self.due += ((now - self.due) // self._interval + 1) * self._interval
            self.due = max(self.due, now + (now - begin) / _MAX_SHARE)

    def _unsent(self, *, is_taken: bool, is_final: bool) -> Generator[None, None, list[bytes]]:
        """Return the snapshots that this stream has not sent, whoever took them. is_taken: take another one first."""
        if is_taken and not self._table.last.is_final:
            # when rows were taken out of the kernel, rather than when they got here, some 10 ms later: rates are of the
            # time in which the hits fired
            end_ns = time.monotonic_ns() if is_final else max(self._collected_ns, self._table.last.end_ns)
            self._collected_ns = 0
            self._table.take(end_ns, is_final=is_final)
        unsent = self._table.taken_from(self._next_number)
        if not unsent:
            return []
        self._next_number = unsent[-1].number + 1
        messages = []
        waiting = yield from subscription_messages.open_spans(self._clause, self._wall_clock)
        for snapshot in unsent:
            account = subscription_messages.account(self._clause.account(snapshot))
            # of earlier ones, which a stream did not come to send, it is not known any more
            is_open = waiting if snapshot is unsent[-1] else None
            for message in snapshots.messages(snapshot, self._aggregation, account, self._wall_clock, is_open):
                messages.append(pb.StreamResponse(snapshot=message).SerializeToString())
                yield
        return messages

    async def complete(self) -> None:
        """Wait for a while until what fired before now is there, which belongs to this interval."""
        now = self._clock()
        if self._collecting is None:
            self._collecting, self._asked = self._clause.settled(self._collect(self._clause.key)), now
        collecting = asyncio.wrap_future(self._collecting)
        await asyncio.wait({collecting}, timeout=_COLLECT_SECONDS)
        collecting.cancel()
        if not self._collecting.done() and self._clock() - self._asked < _HUNG_SECONDS:
            # on a busy host; a snapshot would lack hits, which the next one had too many of
            return
        has_all = self._collecting.done() and self._collecting.exception() is None
        # if the engine has failed, so much is known
        self._collected_ns = self._collecting.result() if has_all else time.monotonic_ns()
        self._collecting = None
