"""Subscriptions that end: the engine closes them, and clients may read for some seconds what had fired before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from stapsdtd.model import Object
from stapsdtd.runtime.futures import unfinished
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.armer import Armer, CallSoon
from stapsdtd.sessions.live import LiveSubscription
from stapsdtd.sessions.session import Closed
from stapsdtd.sessions.subscription import EndReason, Subscription
from stapsdtd.sessions.sweeping import settled_spans
from stapsdtd.sessions.totals import AccountTotals

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """disarmed: done when nothing is patched for the subscription any more, or with the error of closing it."""

    subscription: Subscription
    disarmed: Future[None]


class EndingSubscriptions:
    """Runs on the control thread's event loop; `get` may be called from any thread."""

    def __init__(
        self,
        armer: Armer,
        totals: AccountTotals,
        call_soon: CallSoon,
        on_closed: Callable[[Subscription], None],
        kept_seconds: float,
    ) -> None:
        """on_closed: called when the engine has closed a subscription. kept_seconds: how long clients may read it."""
        self._loop = asyncio.get_running_loop()
        self._armer = armer
        self._totals = totals
        self._call_soon = call_soon
        self._on_closed = on_closed
        self._kept_seconds = kept_seconds
        self._kept: dict[str, Ending] = {}

    def add(self, subscription: Subscription) -> None:
        """Keep a subscription from now on. Its ending begins at once."""
        self._kept[subscription.id] = Ending(subscription, unfinished())

    def begin(self, live: LiveSubscription, reason: EndReason, unmapped: Sequence[Object]) -> Ending:
        """Disarm what only this subscription used. Its `ended` is done when its log has all that fired.

        unmapped: objects whose disarming nobody waits for.
        """
        ending = self._kept[live.subscription.id]
        ending.subscription.is_ending = True
        self._totals.ended(ending.subscription)
        closed = self._armer.close(live, unmapped)
        closed.add_done_callback(lambda done: self._call_soon(partial(self._close, ending, reason, done)))
        return ending

    def _close(self, ending: Ending, reason: EndReason, done: Future[Closed]) -> None:
        self._on_closed(ending.subscription)
        if error := done.exception():
            extra = fields(client=ending.subscription.client.name)
            _log.error("subscription %s did not end cleanly", ending.subscription.id, exc_info=error, extra=extra)
            self._end_with(ending.subscription, reason)
            ending.disarmed.set_exception(error)
            return
        closed = done.result()
        if closed.delivered.done():
            self._end_with(ending.subscription, reason)
        else:
            closed.delivered.add_done_callback(
                lambda _: self._call_soon(partial(self._end_with, ending.subscription, reason))
            )
        closed.quiesced.add_done_callback(lambda _: ending.disarmed.set_result(None))

    def _end_with(self, subscription: Subscription, reason: EndReason) -> None:
        self._settle(settled_spans(subscription.clauses), subscription, reason)

    def _settle(self, steps: Generator[None, None, None], subscription: Subscription, reason: EndReason) -> None:
        """Take a step, and let others have their turns before the next one; end the subscription after the last."""
        try:
            next(steps)
        except StopIteration:
            self._end(subscription, reason)
        except Exception:
            self._end(subscription, reason)
            raise
        else:
            self._loop.call_soon(self._settle, steps, subscription, reason)

    def _end(self, subscription: Subscription, reason: EndReason) -> None:
        subscription.end(reason)
        self._loop.call_later(self._kept_seconds, self._forget, subscription)

    def _forget(self, subscription: Subscription) -> None:
        if subscription.is_read:
            # a slow client still gets the rest
            self._loop.call_later(self._kept_seconds, self._forget, subscription)
            return
        del self._kept[subscription.id]
        self._totals.settle(subscription)

    def get(self, ident: str) -> Ending | None:
        return self._kept.get(ident)

    def all(self) -> list[Subscription]:
        """Return the subscriptions whose events are still kept."""
        return [ending.subscription for ending in self._kept.values()]
