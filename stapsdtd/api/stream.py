"""One client's stream: a subscription's log, losses and statuses as messages, in an order that makes sense to read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from stapsdtd.api import convert, rows
from stapsdtd.capture.engine import LossStage
from stapsdtd.errors import StapsdtdError
from stapsdtd.sessions.log import Entry
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


class TakenOverError(StapsdtdError):
    """Another stream of the same subscription began."""

    def __init__(self) -> None:
        super().__init__("another stream of this subscription took over")


class SubscriptionStream:
    """Iterates until the subscription ends; `stop` ends it before."""

    def __init__(self, subscription: Subscription, encoding: int, from_seq: int | None) -> None:
        self._subscription = subscription
        self._by_rows = encoding != pb.StreamRequest.ENCODING_COLUMNS
        self._seq = from_seq
        self._described: set[int] = set()
        self._told = dict.fromkeys(LossStage, 0)
        self._news = asyncio.Event()
        self._waking = False
        self._stopped: StapsdtdError | None = None

    @property
    def subscription(self) -> Subscription:
        return self._subscription

    def stop(self, why: StapsdtdError) -> None:
        """Have `messages` raise that."""
        self._stopped = why
        self._news.set()

    async def messages(self) -> AsyncIterator[pb.StreamResponse]:
        """Raises what `stop` was given."""
        loop = asyncio.get_running_loop()
        if self._seq is not None:
            self._subscription.log.resume(self._seq)
        forget = self._subscription.wake_with(lambda: self._wake(loop))
        try:
            while True:
                self._news.clear()
                # before anything is read: what comes from here on wakes anew
                self._waking = False
                # what comes after the end has been seen is nothing, so that an empty log then is the last word
                end = self._subscription.end_reason
                while True:
                    if self._stopped is not None:
                        raise self._stopped
                    for message in self._asides():
                        yield message
                    entry = self._subscription.log.read(self._seq)
                    if entry is None:
                        break
                    for message, next_seq in self._events(entry):
                        yield message
                        if self._stopped is None:
                            self._subscription.log.handed_out(entry, next_seq)
                    self._seq = entry.next_seq
                if end is not None:
                    account = convert.account(self._subscription.account())
                    yield pb.StreamResponse(end=pb.End(reason=convert.END_REASONS[end], account=account))
                    return
                await self._news.wait()
        finally:
            forget()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """In any thread. One wake-up is enough until the stream looks: each interrupts the engine's reader."""
        if not self._waking:
            self._waking = True
            loop.call_soon_threadsafe(self._news.set)

    def _asides(self) -> Iterator[pb.StreamResponse]:
        statuses = self._subscription.new_statuses()
        if statuses:
            yield pb.StreamResponse(status=pb.Status(sites=map(convert.site_status, statuses)))
        for stage, total in self._subscription.losses().items():
            told = self._told[stage]
            if total > told:
                self._told[stage] = total
                yield pb.StreamResponse(loss=pb.Loss(stage=convert.LOSS_STAGES[stage], count=total - told, total=total))

    def _events(self, entry: Entry) -> Iterator[tuple[pb.StreamResponse, int]]:
        """Messages, and the number up to which a client that has them has all events."""
        mentioned = {number for numbered in entry.blocks for number in numbered.block.site_ids()}
        sites = self._subscription.known_sites(sorted(mentioned))
        new = {number: known for number, known in sites.items() if number not in self._described}
        if new:
            self._described |= new.keys()
            yield pb.StreamResponse(descriptions=convert.descriptions(new)), entry.first_seq
        offset = self._subscription.realtime_offset_ns
        if self._by_rows:
            yield from rows.messages(entry, offset, sites)
        else:
            yield pb.StreamResponse(columns=convert.columns(entry, offset)), entry.next_seq
