"""The open Stream calls, at most one for each subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stapsdtd.api.access import Caller
from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import revoked
from stapsdtd.api.stream import SubscriptionStream, TakenOverError

_READ_SECONDS = 1.0
_FINISH_SECONDS = 5.0


class Streams:
    """Runs on the API's event loop."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[SubscriptionStream, Caller]] = {}
        self._all_ended = asyncio.Event()

    @contextmanager
    def opened(self, stream: SubscriptionStream, caller: Caller) -> Iterator[None]:
        """Count a stream as open within the context, and stop an earlier one of the same subscription."""
        ident = stream.subscription.id
        previous = self._open.get(ident)
        if previous is not None:
            previous[0].stop(TakenOverError())
        self._open[ident] = stream, caller
        try:
            yield
        finally:
            if self._open.get(ident) == (stream, caller):
                del self._open[ident]
            if not self._open:
                self._all_ended.set()

    async def finish(self, read_seconds: float = _READ_SECONDS, seconds: float = _FINISH_SECONDS) -> None:
        """Let the streams of ended subscriptions deliver what they have, as long as clients read at all.

        After `seconds`, or read_seconds without a message that was taken, the rest is discarded, so that each client
        that still reads gets its End, which counts that as lost.
        """
        taken = -1
        deadline = asyncio.get_running_loop().time() + seconds
        while self._open:
            before, taken = taken, sum(stream.taken for stream, _ in self._open.values())
            left = deadline - asyncio.get_running_loop().time()
            if taken == before or left <= 0:
                break
            self._all_ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), min(read_seconds, left))
        for stream, _ in self._open.values():
            for clause in stream.subscription.clauses:
                clause.log.discard()

    def apply(self, policy: Policy) -> None:
        """Stop the streams that policy does not allow."""
        for stream, caller in self._open.values():
            rights = policy.rights_or_none(caller.peer)
            # the stream of an ending subscription still delivers what fired before, and ends with its own End
            is_live = not stream.subscription.is_ending
            if is_live and (rights is None or not rights.may_use(stream.subscription)):
                stream.stop(revoked("trace"))
