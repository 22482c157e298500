"""One Stream call: what a subscription has to tell, as messages."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from stapsdtd.api import subscription_messages, wire
from stapsdtd.api.parts import one_of_many
from stapsdtd.capture.engine import LossStage
from stapsdtd.errors import StapsdtdError
from stapsdtd.runtime.wall_clock import ClockChange
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.subscription import EndReason, SiteStatus, Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


class TakenOverError(StapsdtdError):
    """Another stream of the same subscription was opened."""

    grpc_code = "ABORTED"

    def __init__(self) -> None:
        super().__init__("another stream of this subscription took over")


@dataclass(frozen=True, slots=True)
class StreamTurns:
    """Makes messages in steps, beside what others want made.

    messages: what is always much. soon: what may be little and is made at once then, see `Listing.soon`.
    """

    messages: Callable[[Generator[None, None, list[bytes]]], Awaitable[list[bytes]]]
    soon: Callable[[Generator[None, None, bytes]], Awaitable[bytes]]


class ClauseReader(ABC):
    """Reads what one clause has to tell."""

    due: float | None = None
    """When there is something to read even if nothing wakes the stream, on the monotonic clock; None for never."""

    def __init__(self, clause: Clause) -> None:
        self._clause = clause
        self._reported_losses = dict.fromkeys(LossStage, 0)
        # fields of a message may come in pieces, of which the last one is this
        self.suffix = pb.StreamResponse(tag=clause.spec.tag).SerializeToString()

    @abstractmethod
    def new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        """Yield some of what is new, so that other clauses get their turn; nothing if there is no more.

        is_ended: nothing will be added.
        """

    @abstractmethod
    async def complete(self) -> None:
        """Return when all that fired until `due` can be read."""

    def _losses(self) -> Iterator[bytes]:
        for stage, total in self._clause.losses().items():
            reported = self._reported_losses[stage]
            if total > reported:
                self._reported_losses[stage] = total
                loss = pb.Loss(stage=subscription_messages.LOSS_STAGES[stage], count=total - reported, total=total)
                yield pb.StreamResponse(loss=loss).SerializeToString()


class SubscriptionStream:
    """Produces messages until the subscription ends or `stop` is called."""

    def __init__(
        self,
        subscription: Subscription,
        readers: Sequence[ClauseReader],
        turns: StreamTurns,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """readers: of the subscription's clauses."""
        self.subscription = subscription
        self._readers = readers
        self._turns = turns
        self._clock = clock
        self._clock_told_ns = subscription.created_monotonic_ns
        self._woken = asyncio.Event()
        self._waking = False
        self._stopped: StapsdtdError | None = None
        self.taken = 0
        """Messages that gRPC has taken, which it does as the client reads."""

    def stop(self, error: StapsdtdError) -> None:
        """Make `messages` raise error."""
        self._stopped = error
        self._woken.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield serialized StreamResponses. Raises the error passed to `stop`."""
        loop = asyncio.get_running_loop()
        wakers = (self.subscription.wake_with, self.subscription.wall_clock.wake_with)
        unregister = [wake_with(lambda: self._wake(loop)) for wake_with in wakers]
        try:
            while True:
                self._woken.clear()
                # reset before reading, so that whatever arrives from here on wakes the stream again
                self._waking = False
                # nothing is added after the end, so having nothing more to read after this means that all was sent
                end = self.subscription.end_reason
                async with aclosing(self._new_messages(is_ended=end is not None)) as messages:
                    async for message in messages:
                        yield message
                        self.taken += 1
                        if self._stopped is not None:
                            break
                if self._stopped is not None:
                    raise self._stopped
                if end is not None:
                    yield await self._turns.soon(self._end(end))
                    return
                await self._wait()
        finally:
            for end_waking in unregister:
                end_waking()

    async def _new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        """Yield what is new, of each clause in turn, until there is no more."""
        has_more = True
        while has_more:
            has_more = False
            statuses, changes = self.subscription.new_statuses(), self._new_clock_changes()
            if changes:
                status = pb.Status(clock_changes=subscription_messages.clock_changes(changes))
                yield pb.StreamResponse(status=status).SerializeToString()
            told = iter(statuses)
            while sites := await self._turns.soon(one_of_many(pb.Status.SITES_FIELD_NUMBER, told, self._site_status)):
                yield wire.delimited(pb.StreamResponse.STATUS_FIELD_NUMBER, sites)
            for reader in self._readers:
                async with aclosing(reader.new_messages(is_ended=is_ended)) as messages:
                    async for message in messages:
                        has_more = True
                        yield message + reader.suffix if reader.suffix else message

    def _site_status(self, status: SiteStatus) -> pb.SiteStatus:
        return subscription_messages.site_status(self.subscription, status)

    def _end(self, reason: EndReason) -> Generator[None, None, bytes]:
        end = yield from subscription_messages.end(reason, self.subscription)
        return pb.StreamResponse(end=end).SerializeToString()

    def _new_clock_changes(self) -> list[ClockChange]:
        """Return those that this stream has not told of."""
        changes = self.subscription.wall_clock.changes_after(self._clock_told_ns)
        if changes:
            self._clock_told_ns = changes[-1].monotonic_ns
        return changes

    async def _wait(self) -> None:
        """Return when there may be something new."""
        dues = [reader.due for reader in self._readers if reader.due is not None]
        if not dues:
            await self._woken.wait()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), max(min(dues) - self._clock(), 0))
        if self.subscription.end_reason is None:
            now = self._clock()
            due = (reader.complete() for reader in self._readers if reader.due is not None and now >= reader.due)
            await asyncio.gather(*due)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the stream, from any thread, but only once until it has run: each wake-up costs the engine's reader."""
        if not self._waking:
            self._waking = True
            loop.call_soon_threadsafe(self._woken.set)
