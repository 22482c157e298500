"""One Stream call: what a subscription has to tell, as messages."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

from stapsdtd.api import convert
from stapsdtd.capture.engine import LossStage
from stapsdtd.errors import StapsdtdError
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.v1 import stapsdt_pb2 as pb


class TakenOverError(StapsdtdError):
    """Another stream of the same subscription was opened."""

    grpc_code = "ABORTED"

    def __init__(self) -> None:
        super().__init__("another stream of this subscription took over")


class SubscriptionStream(ABC):
    """Produces messages until the subscription ends or `stop` is called."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._reported_losses = dict.fromkeys(LossStage, 0)
        self._woken = asyncio.Event()
        self._waking = False
        self._stopped: StapsdtdError | None = None

    @property
    def subscription(self) -> Subscription:
        return self._subscription

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    def stop(self, error: StapsdtdError) -> None:
        """Make `messages` raise error."""
        self._stopped = error
        self._woken.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield serialized StreamResponses. Raises the error passed to `stop`."""
        loop = asyncio.get_running_loop()
        unregister = self._subscription.wake_with(lambda: self._wake(loop))
        try:
            while True:
                self._woken.clear()
                # reset before reading, so that whatever arrives from here on wakes the stream again
                self._waking = False
                # nothing is added after the end, so having nothing more to read after this means that all was sent
                end = self._subscription.end_reason
                async with aclosing(self._new_messages(is_ended=end is not None)) as messages:
                    async for message in messages:
                        yield message
                        if self._stopped is not None:
                            break
                if self._stopped is not None:
                    raise self._stopped
                if end is not None:
                    account = convert.account(self._subscription.account())
                    yield pb.StreamResponse(
                        end=pb.End(reason=convert.END_REASONS[end], account=account)
                    ).SerializeToString()
                    return
                await self._wait()
        finally:
            unregister()

    @abstractmethod
    def _new_messages(self, *, is_ended: bool) -> AsyncGenerator[bytes, None]:
        """Yield what is new, until there is no more. is_ended: nothing will be added."""

    async def _wait(self) -> None:
        """Return when there may be something new."""
        await self._woken.wait()

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
