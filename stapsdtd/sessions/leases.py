"""How long a subscription lives that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stapsdtd.sessions.held import Held


class Leases:
    """A lease begins when the last stream ends. Runs on an event loop."""

    def __init__(self, expire: Callable[[str], None]) -> None:
        """expire: ends a subscription, by its id."""
        self._loop = asyncio.get_running_loop()
        self._expire = expire

    def start(self, held: Held) -> None:
        subscription = held.subscription
        held.lease = self._loop.call_later(subscription.spec.lease_seconds, self._expire, subscription.id)

    def cancel(self, held: Held) -> None:
        if held.lease is not None:
            held.lease.cancel()
            held.lease = None

    def stream_opened(self, held: Held) -> None:
        held.streams += 1
        self.cancel(held)

    def stream_closed(self, held: Held) -> None:
        held.streams -= 1
        if held.streams == 0:
            self.start(held)

    def seconds_left(self, held: Held) -> float:
        """Return 0 while a stream is open."""
        return max(held.lease.when() - self._loop.time(), 0.0) if held.lease else 0.0
