"""All subscriptions: how they begin and end, and how they follow objects that come and go."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from stapsdtd.capture.engine import Engine
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.config import NO_QUOTAS, Limits, Quotas
from stapsdtd.errors import ServerStoppingError, UnknownSubscriptionError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object, ObjectKey
from stapsdtd.procs.objects import Parse
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.fair_thread import FairThread
from stapsdtd.runtime.futures import all_done, unfinished
from stapsdtd.sessions.admission import AdmissionControl
from stapsdtd.sessions.armer import Armer
from stapsdtd.sessions.attacher import Attacher, Closed, Session
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.foreign_bounds import ForeignBounds
from stapsdtd.sessions.housekeeping import Housekeeping
from stapsdtd.sessions.leases import Leases
from stapsdtd.sessions.live import FirstArming, LiveSubscription
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.subscription import EndReason, SiteStatus, Subscription, SubscriptionSpec
from stapsdtd.sessions.totals import AccountTotals

_log = logging.getLogger(__name__)

_ENDED_KEPT_SECONDS = 10.0
_REWRITTEN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Ending:
    """disarmed: done when nothing is patched for the subscription any more, or with the error of closing it."""

    subscription: Subscription
    disarmed: Future[None]


class Subscriptions:
    """Runs on the control thread's event loop; `get` and `all` may be called from any thread.

    arming: how long it takes to arm an object's sites. It and totals may be read by any thread.
    """

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        watcher: Watcher,
        parse: Parse,
        limits: Limits,
        *,
        arming_thread: FairThread,
        connected: ConnectedClients,
        nops: NopRewriting,
        filesystems: Filesystems,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """arming_thread: the only one that calls the engine to arm and disarm."""
        self._connected = connected
        self._registry = registry
        self._engine = engine
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._subscription_keys = itertools.count(1)
        self._live: dict[str, LiveSubscription] = {}
        self._ended: dict[str, Subscription] = {}
        self._closing = False
        self.totals = AccountTotals()
        self.foreign = ForeignBounds(clock)
        self._admission = AdmissionControl(limits)
        self._file_writes = FileWriteWatcher(self._on_write)
        # each thread needs its own, which makes the calls that may wait for a process's lock
        own_filesystems = Filesystems(filesystems.armed_too)
        self._attacher = Attacher(engine, parse, nops=nops, filesystems=own_filesystems, file_writes=self._file_writes)
        self._armer = Armer(
            registry,
            self._attacher,
            arming_thread,
            filesystems=filesystems,
            file_writes=self._file_writes,
            foreign=self.foreign,
            call_soon=self._call_soon,
            charge=watcher.charge,
            clock=clock,
        )
        self.arming = self._attacher.latency
        self._leases = Leases(self._expire)
        self._stop_listening = registry.listen(self._on_change)
        self.housekeeping = Housekeeping(
            self._live, registry, watcher, self._armer, self.foreign, engine, arming_thread
        )
        self.housekeeping.start()

    def subscribe(
        self, spec: SubscriptionSpec, client: str = "", quotas: Quotas = NO_QUOTAS
    ) -> tuple[Subscription, Future[None]]:
        """Begin to arm all sites that match now. client: names the owner, whose subscriptions share its quotas.

        The future is done when all that matches is armed or refused; see first_statuses(). It has an error if the
        engine cannot open the subscription, or there is a defect. Raises LimitReachedError.
        """
        if self._closing:
            raise ServerStoppingError
        refreshed = self._watcher.refresh()
        others = [live.subscription for live in self._live.values()]
        principal = self._admission.admit(spec.queue_bytes, client, quotas, others, list(self._ended.values()))
        subscription = Subscription(
            secrets.token_hex(8),
            next(self._subscription_keys),
            spec,
            os.getpid(),
            self._engine.why_not,
            principal,
            self._connected,
        )
        first = FirstArming()
        live = LiveSubscription(subscription, Session(subscription), first=first)
        self._live[subscription.id] = live
        self.housekeeping.began(subscription)
        self.totals.began(subscription)
        try:
            self._armer.open(live, first)
            first.add()
            refreshed.add_done_callback(lambda _: self._call_soon(first.settle))
            for obj in self._registry.objects():
                self._armer.consider(live, obj)
        except BaseException:
            self.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)
            raise
        self._leases.start(live)
        return subscription, first.done

    def first_statuses(self, ident: str) -> list[SiteStatus]:
        """Return the statuses of the sites that matched at first, once; later ones go to the stream.

        Raises UnknownSubscriptionError.
        """
        live = self._live.get(ident)
        if live is None:
            raise UnknownSubscriptionError(ident)
        self._armer.report_late(live, seconds=0)
        statuses = live.first.statuses if live.first else []
        live.first = None
        return statuses

    def unsubscribe(self, ident: str, reason: EndReason) -> Ending:
        """Disarm what only this subscription used. Its `ended` is done when its log has all that fired.

        The log can still be read for some seconds after that, even by a new stream. Raises UnknownSubscriptionError.
        """
        live = self._live.get(ident)
        if live is None:
            raise UnknownSubscriptionError(ident)
        # in this order, since another thread may look for it in between
        self._ended[ident] = live.subscription
        del self._live[ident]
        subscription = live.subscription
        self._leases.cancel(live)
        subscription.is_ending = True
        self.totals.ended(subscription)
        ending = Ending(subscription, unfinished())
        closed = self._armer.close(live)
        closed.add_done_callback(lambda done: self._call_soon(partial(self._on_closed, ending, reason, done)))
        return ending

    def _on_closed(self, ending: Ending, reason: EndReason, done: Future[Closed]) -> None:
        self.housekeeping.closed(ending.subscription)
        # what waits to be closed takes memory yet
        self._admission.release(ending.subscription.client, ending.subscription.spec.queue_bytes)
        if error := done.exception():
            _log.error("subscription %s did not end cleanly", ending.subscription.id, exc_info=error)
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
        subscription.end(reason)
        self._loop.call_later(_ENDED_KEPT_SECONDS, self._forget, subscription)

    def _forget(self, ended: Subscription) -> None:
        if ended.is_read:
            # a slow client still gets the rest
            self._loop.call_later(_ENDED_KEPT_SECONDS, self._forget, ended)
            return
        del self._ended[ended.id]
        self.totals.settle(ended)
        # do not wait for the garbage collector, since the subscription refers to itself
        ended.log.forget()

    def close_all(self) -> list[Future[None]]:
        """Unsubscribe all. The futures are done when the logs have all that fired."""
        self._closing = True
        self.housekeeping.stop()
        self._stop_listening()
        self._file_writes.close()
        self._unsubscribe_each(list(self._live), EndReason.SERVER_STOPPING)
        return [subscription.ended for subscription in list(self._ended.values())]

    def _unsubscribe_each(self, idents: Iterable[str], reason: EndReason) -> None:
        for ident in idents:
            try:
                self.unsubscribe(ident, reason)
            except Exception:  # noqa: BLE001 - the others are to end as well
                _log.exception("subscription %s did not end cleanly", ident)

    def arming_for(self, client: str) -> Future[None]:
        """Return a future that is done when everything now being armed for a client is armed, except what is late."""
        of_client = [live for live in self._live.values() if live.subscription.client.name == client]
        return all_done([arming for live in of_client for arming in self._armer.arming_of(live)])

    def get(self, ident: str) -> Subscription:
        """Return a subscription that is live or ended a moment ago. Raises UnknownSubscriptionError."""
        live = self._live.get(ident)
        subscription = live.subscription if live else self._ended.get(ident)
        if subscription is None:
            raise UnknownSubscriptionError(ident)
        return subscription

    def all(self) -> list[tuple[Subscription, bool, float]]:
        """Return each live subscription, whether a stream is open, and the seconds left of its lease."""
        return [
            (live.subscription, live.streams > 0, self._leases.seconds_left(live)) for live in list(self._live.values())
        ]

    def stream_opened(self, ident: str) -> None:
        """Suspend the lease, unless the subscription ended."""
        if live := self._live.get(ident):
            self._leases.stream_opened(live)

    def stream_closed(self, ident: str) -> None:
        if live := self._live.get(ident):
            self._leases.stream_closed(live)

    def _expire(self, ident: str) -> None:
        _log.info("subscription %s: the lease expired", ident)
        self.unsubscribe(ident, EndReason.LEASE_EXPIRED)

    def revoke(self, is_allowed: Callable[[Subscription], bool]) -> int:
        """End the subscriptions that are not allowed any more. Return how many."""
        ended = [live.subscription.id for live in self._live.values() if not is_allowed(live.subscription)]
        self._unsubscribe_each(ended, EndReason.ACCESS_REVOKED)
        return len(ended)

    def _on_change(self, change: Change) -> None:
        for live in list(self._live.values()):
            self._armer.consider(live, change.object)

    def _on_write(self, written: set[ObjectKey]) -> None:
        """Disarm files before anyone maps their new content. If the probes did not change, arm them again soon."""
        for live in list(self._live.values()):
            for key in written & live.considered.keys():
                obj = live.considered[key].object
                self._armer.disarm(live, obj, is_awaited=True, then=partial(self._consider_later, live, obj))

    def _consider_later(self, live: LiveSubscription, obj: Object) -> None:
        self._loop.call_later(_REWRITTEN_SECONDS, self._consider_again, live, obj)

    def _consider_again(self, live: LiveSubscription, obj: Object) -> None:
        if live.subscription.id in self._live:
            self._armer.consider(live, obj)

    def _call_soon(self, work: Callable[[], None]) -> None:
        """Have the control thread do work. Safe to call from any thread."""
        self._loop.call_soon_threadsafe(work)
