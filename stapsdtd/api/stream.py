"""One Stream call: a subscription's events, losses and statuses as messages, each preceded by what it refers to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from stapsdtd.api import columns, convert, rows
from stapsdtd.capture.engine import LossStage
from stapsdtd.errors import StapsdtdError
from stapsdtd.sessions.log import Entry
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


class TakenOverError(StapsdtdError):
    """Another stream of the same subscription was opened."""

    grpc_code = "ABORTED"

    def __init__(self) -> None:
        super().__init__("another stream of this subscription took over")


class SubscriptionStream:
    """Produces messages until the subscription ends or `stop` is called."""

    def __init__(self, subscription: Subscription, encoding: int, from_seq: int | None) -> None:
        self._subscription = subscription
        self._as_rows = encoding != pb.StreamRequest.ENCODING_COLUMNS
        self._seq = from_seq
        self._described: set[int] = set()
        self._reported_losses = dict.fromkeys(LossStage, 0)
        self._woken = asyncio.Event()
        self._waking = False
        self._stopped: StapsdtdError | None = None

    @property
    def subscription(self) -> Subscription:
        return self._subscription

    def stop(self, error: StapsdtdError) -> None:
        """Make `messages` raise error."""
        self._stopped = error
        self._woken.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield serialized StreamResponses. Raises the error passed to `stop`."""
        loop = asyncio.get_running_loop()
        if self._seq is not None:
            self._subscription.log.resume(self._seq)
        unregister = self._subscription.wake_with(lambda: self._wake(loop))
        try:
            while True:
                self._woken.clear()
                # reset before reading, so that whatever arrives from here on wakes the stream again
                self._waking = False
                # nothing is added after the end, so an empty log read after this means that all was sent
                end = self._subscription.end_reason
                while True:
                    if self._stopped is not None:
                        raise self._stopped
                    for message in self._statuses_and_losses():
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
                    yield pb.StreamResponse(
                        end=pb.End(reason=convert.END_REASONS[end], account=account)
                    ).SerializeToString()
                    return
                await self._woken.wait()
        finally:
            unregister()

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the stream, from any thread, but only once until it has run: each wake-up costs the engine's reader."""
        if not self._waking:
            self._waking = True
            loop.call_soon_threadsafe(self._woken.set)

    def _statuses_and_losses(self) -> Iterator[bytes]:
        statuses = self._subscription.new_statuses()
        if statuses:
            status = pb.Status(sites=map(convert.site_status, statuses))
            yield pb.StreamResponse(status=status).SerializeToString()
        for stage, total in self._subscription.losses().items():
            reported = self._reported_losses[stage]
            if total > reported:
                self._reported_losses[stage] = total
                loss = pb.Loss(stage=convert.LOSS_STAGES[stage], count=total - reported, total=total)
                yield pb.StreamResponse(loss=loss).SerializeToString()

    def _events(self, entry: Entry) -> Iterator[tuple[bytes, int]]:
        """Yield messages, each with the seq of the next event that a client lacks once it has received it."""
        sites = self._subscription.known_sites(entry.batch.site_ids())
        undescribed = {site_id: site for site_id, site in sites.items() if site_id not in self._described}
        if undescribed:
            self._described |= undescribed.keys()
            descriptions = pb.StreamResponse(descriptions=convert.descriptions(undescribed))
            yield descriptions.SerializeToString(), entry.first_seq
        offset_ns = self._subscription.realtime_offset_ns
        if self._as_rows:
            yield from rows.messages(entry, offset_ns, sites)
        else:
            yield columns.message(entry, offset_ns), entry.next_seq
