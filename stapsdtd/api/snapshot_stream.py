"""A stream of the snapshots of an aggregation, with losses and statuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.aggregate.table import Snapshot, Table
from stapsdtd.api import convert, snapshots
from stapsdtd.api.stream import SubscriptionStream
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb

Collect = Callable[[SubscriptionKey], Future[None]]

_COLLECT_SECONDS = 1.0


class SnapshotStream(SubscriptionStream):
    """Takes a snapshot at each interval, and one at the end. Without a stream, the next one covers the time between."""

    def __init__(
        self,
        subscription: Subscription,
        table: Table,
        aggregation: Aggregation,
        from_number: int | None,
        collect: Collect,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """from_number: of the first snapshot that the client lacks. collect: see `Engine.collect`."""
        super().__init__(subscription)
        self._table = table
        self._aggregation = aggregation
        self._from_number = from_number
        self._collect = collect
        self._clock = clock
        self._due = clock() + aggregation.interval_ms / 1000 if aggregation.interval_ms else None

    def _new_messages(self, *, is_ended: bool) -> Iterator[bytes]:
        yield from self._statuses_and_losses()
        last = self._table.again()
        if self._from_number is not None and last.number >= self._from_number:
            yield from self._written(last)
        self._from_number = None
        if is_ended:
            if not last.is_final:
                yield from self._written(self._table.take(time.monotonic_ns(), is_final=True))
        elif self._due is not None and self._clock() >= self._due:
            yield from self._written(self._table.take(time.monotonic_ns()))
            intervals = (self._clock() - self._due) * 1000 // self._aggregation.interval_ms + 1
            self._due += intervals * self._aggregation.interval_ms / 1000

    def _written(self, snapshot: Snapshot) -> Iterator[bytes]:
        account = convert.account(self._subscription.account(snapshot))
        offset_ns = self._subscription.realtime_offset_ns
        for message in snapshots.messages(snapshot, self._aggregation, account, offset_ns):
            yield pb.StreamResponse(snapshot=message).SerializeToString()

    async def _wait(self) -> None:
        if self._due is None:
            await super()._wait()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(super()._wait(), max(self._due - self._clock(), 0))
        if self._clock() >= self._due and self._subscription.end_reason is None:
            # what fired until now belongs to this interval; if the engine has failed, so much is known
            collected = asyncio.wrap_future(self._collect(self._subscription.subscription_key))
            await asyncio.wait({collected}, timeout=_COLLECT_SECONDS)
            collected.cancel()
