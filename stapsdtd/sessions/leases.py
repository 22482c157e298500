"""Leases: how long a subscription lives while no stream reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stapsdtd.sessions.live import LiveSubscription


class Leases:
    """A lease begins when the last stream ends. Runs on an event loop."""

    def __init__(self, expire: Callable[[str], None]) -> None:
        """expire: called with a subscription's id when its lease ends."""
        self._loop = asyncio.get_running_loop()
        self._expire = expire

    def start(self, live: LiveSubscription) -> None:
        subscription = live.subscription
        live.lease = self._loop.call_later(subscription.spec.lease_seconds, self._expire, subscription.id)

    def cancel(self, live: LiveSubscription) -> None:
        if live.lease is not None:
            live.lease.cancel()
            live.lease = None

    def stream_opened(self, live: LiveSubscription) -> None:
        live.streams += 1
        self.cancel(live)

    def stream_closed(self, live: LiveSubscription) -> None:
        live.streams -= 1
        if live.streams == 0:
            self.start(live)

    def seconds_left(self, live: LiveSubscription) -> float:
        """Return the rest of the lease, or 0 while a stream is open."""
        return max(live.lease.when() - self._loop.time(), 0.0) if live.lease else 0.0
