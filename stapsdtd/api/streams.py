"""The open Stream calls, at most one for each subscription."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stapsdtd.api.access import Caller
from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import revoked
from stapsdtd.api.stream import SubscriptionStream, TakenOverError


class Streams:
    """Runs on the API's event loop."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[SubscriptionStream, Caller]] = {}

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

    def apply(self, policy: Policy) -> None:
        """Stop the streams that policy does not allow."""
        for stream, caller in self._open.values():
            rights = policy.rights_or_none(caller.peer)
            # the stream of an ending subscription still delivers what fired before, and ends with its own End
            is_live = not stream.subscription.is_ending
            if is_live and (rights is None or not rights.may_use(stream.subscription)):
                stream.stop(revoked())
