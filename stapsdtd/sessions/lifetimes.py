"""When subscriptions end by themselves: a lease after their last stream, or with the processes in their scope."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from stapsdtd.runtime.logs import fields
from stapsdtd.runtime.timer import Timer
from stapsdtd.sessions.live import LiveSubscription
from stapsdtd.sessions.scoped_processes import ProcessExits
from stapsdtd.sessions.subscription import EndReason, Subscription

_log = logging.getLogger(__name__)

_FOLLOWED_SECONDS = 0.5
"""How often to look whether processes that are followed have ended."""


class Lifetimes:
    """Runs on an event loop."""

    def __init__(self, live: Mapping[str, LiveSubscription], end: Callable[[str, EndReason], object]) -> None:
        """live: the live subscriptions, by id. end: called with a subscription's id when it is to end."""
        self._loop = asyncio.get_running_loop()
        self._live = live
        self._end = end
        self._exits = ProcessExits()
        self._followed_timer = Timer(_FOLLOWED_SECONDS, self._look_at_followed)

    def follow(self, ident: str, pids: Iterable[int]) -> Callable[[], None]:
        """Follow the processes in the scope of a subscription that is to be. Return a function that ends that.

        Raises InvalidArgumentError if there is no such process, and LimitReachedError.
        """
        return self._exits.follow(pids, partial(self._on_exit, ident))

    def notice_end(self, pid: int) -> None:
        """Note that a followed process has ended, if another one may have its pid by now."""
        self._exits.notice(pid)

    def start(self, live: LiveSubscription) -> None:
        subscription = live.subscription
        live.lease = self._loop.call_later(subscription.spec.lease_seconds, self._expire, subscription)
        if subscription.spec.scope.follow:
            self._followed_timer.set()

    def stop(self, live: LiveSubscription) -> None:
        live.unfollow()
        self._cancel_lease(live)

    def _cancel_lease(self, live: LiveSubscription) -> None:
        if live.lease is not None:
            live.lease.cancel()
            live.lease = None

    def _expire(self, subscription: Subscription) -> None:
        extra = fields(client=subscription.client.name)
        _log.info("subscription %s: the lease expired", subscription.id, extra=extra)
        self._end(subscription.id, EndReason.LEASE_EXPIRED)

    def _on_exit(self, ident: str, pid: int) -> None:
        if live := self._live.get(ident):
            live.subscription.processes.ended(pid)
            self._end_if_over(live)

    def _end_if_over(self, live: LiveSubscription) -> None:
        """End a subscription all of whose processes have ended. Without a stream it has its lease to be read."""
        if live.subscription.is_over and live.streams:
            self._end(live.subscription.id, EndReason.PROCESSES_ENDED)

    def _look_at_followed(self) -> None:
        """End subscriptions that follow processes, when all have ended: only those that were named report that."""
        following = [live for live in self._live.values() if live.subscription.spec.scope.follow]
        for live in following:
            self._end_if_over(live)
        if following:
            self._followed_timer.set()

    def stream_opened(self, ident: str) -> None:
        """Suspend the lease, unless the subscription ended."""
        if live := self._live.get(ident):
            live.streams += 1
            self._cancel_lease(live)
            self._end_if_over(live)

    def stream_closed(self, ident: str) -> None:
        """Begin the lease if this was the last stream, unless the subscription ended."""
        if live := self._live.get(ident):
            live.streams -= 1
            if live.streams == 0:
                self.start(live)

    def seconds_left(self, live: LiveSubscription) -> float:
        """Return the rest of the lease, or 0 while a stream is open."""
        return max(live.lease.when() - self._loop.time(), 0.0) if live.lease else 0.0
