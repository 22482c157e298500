"""All subscriptions that live: how they begin and end, and what they are told as objects come and go."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from stapsdtd.capture.engine import Engine, SubscriptionKey
from stapsdtd.catalog.registry import Change, Registry
from stapsdtd.config import NO_QUOTAS, Limits, Quotas
from stapsdtd.errors import ServerStoppingError, UnknownSubscriptionError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object, ObjectKey
from stapsdtd.procs.objects import Parse
from stapsdtd.procs.watcher import Watcher
from stapsdtd.sessions.admission import AdmissionControl
from stapsdtd.sessions.armer import Armer, owner_of
from stapsdtd.sessions.file_writes import FileWriteWatcher
from stapsdtd.sessions.foreign_bounds import ForeignBounds
from stapsdtd.sessions.held import Held
from stapsdtd.sessions.leases import Leases
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import EndReason, SiteStatus, Subscription, SubscriptionSpec
from stapsdtd.sessions.totals import AccountTotals

_log = logging.getLogger(__name__)

_HOUSEKEEPING_SECONDS = 2.0
_ENDED_KEPT_SECONDS = 10.0
_LOOK_SECONDS = 1.0


class Subscriptions:
    """Runs on the control thread's event loop; `get` and `all` may be called from any thread.

    totals: what became of all events. arming: how long it takes to arm an object's sites. Both may be read anywhere.
    """

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        watcher: Watcher,
        parse: Parse,
        limits: Limits,
        *,
        connected: ConnectedClients,
        nops: NopRewriting,
        filesystems: Filesystems,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connected = connected
        self._registry = registry
        self._engine = engine
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._subscription_keys = itertools.count(1)
        self._held: dict[str, Held] = {}
        self._ended: dict[str, Subscription] = {}
        self._closing = False
        self.totals = AccountTotals()
        self.foreign = ForeignBounds(clock)
        self._principal_of: dict[SubscriptionKey, Principal] = {}
        self._admission = AdmissionControl(limits)
        self._file_writes = FileWriteWatcher(self._on_write)
        self._armer = Armer(
            registry,
            engine,
            parse,
            nops=nops,
            filesystems=filesystems,
            file_writes=self._file_writes,
            foreign=self.foreign,
            call_soon=self._loop.call_soon_threadsafe,
            clock=clock,
        )
        self.arming = self._armer.arming
        self._leases = Leases(self._expire)
        self._stop_listening = registry.listen(self._on_change)
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_SECONDS, self._keep_house)
        self._looking = self._loop.call_later(_LOOK_SECONDS, self._look_at_foreign_hits)

    def subscribe(
        self, spec: SubscriptionSpec, client: str = "", quotas: Quotas = NO_QUOTAS
    ) -> tuple[Subscription, list[SiteStatus]]:
        """Arm all that matches now. client: whose it is, and who shares quotas with others of the same name.

        Raises LimitReachedError, and TracefsRejectedError where the engine cannot begin at all.
        """
        if self._closing:
            raise ServerStoppingError
        self._watcher.refresh()
        living = [held.subscription for held in self._held.values()]
        principal = self._admission.admit(spec.queue_bytes, client, quotas, living, list(self._ended.values()))
        subscription = Subscription(
            secrets.token_hex(8),
            next(self._subscription_keys),
            spec,
            os.getpid(),
            self._engine.why_not,
            principal,
            self._connected,
        )
        key = subscription.subscription_key
        try:
            self._engine.open(key, subscription.sink, spec.kernel_buffer_kib, owner_of(principal))
        except BaseException:
            self._admission.release(principal, spec.queue_bytes)
            raise
        held = Held(subscription)
        self._held[subscription.id] = held
        self._principal_of[key] = principal
        self.totals.began(subscription)
        statuses: list[SiteStatus] = []
        try:
            for found in self._registry.objects():
                self._armer.consider(held, found)
                statuses += subscription.new_statuses()
        except BaseException:
            self.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)
            raise
        self._leases.start(held)
        return subscription, statuses

    def unsubscribe(self, ident: str, reason: EndReason) -> Subscription:
        """Disarm what only this subscription used. `ended` is done when its log has all that fired; see quiesced() too.

        The log can still be read for some seconds after that, also by a stream that begins only then.
        """
        held = self._held.get(ident)
        if held is None:
            raise UnknownSubscriptionError(ident)
        # in this order, since another thread may look for it in between
        self._ended[ident] = held.subscription
        del self._held[ident]
        subscription = held.subscription
        self._leases.cancel(held)
        self._admission.release(subscription.client, subscription.spec.queue_bytes)
        self._armer.forget(held)
        subscription.is_ending = True
        self.totals.ended(subscription)
        try:
            delivered = self._engine.close(subscription.subscription_key)
        except BaseException:
            self._end_with(subscription, reason)
            raise
        if delivered.done():
            self._end_with(subscription, reason)
        else:
            delivered.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._end_with, subscription, reason))
        return subscription

    def _end_with(self, subscription: Subscription, reason: EndReason) -> None:
        subscription.end(reason)
        self._loop.call_later(_ENDED_KEPT_SECONDS, self._forget, subscription)

    def _forget(self, ended: Subscription) -> None:
        if ended.is_read:
            # a slow client still gets what was left for it
            self._loop.call_later(_ENDED_KEPT_SECONDS, self._forget, ended)
            return
        del self._ended[ended.id]
        self.totals.settle(ended)
        # it refers to itself, and the collector may take its time
        ended.log.forget()

    def quiesced(self, client: Principal) -> Future[None]:
        """Return a future that is done when all that was disarmed so far for a client is out of the processes."""
        return self._armer.quiesced(client)

    def close_all(self) -> list[Future[None]]:
        """Unsubscribe all. What is returned is done when their streams have all that fired."""
        self._closing = True
        self._housekeeping.cancel()
        self._looking.cancel()
        self._stop_listening()
        self._file_writes.close()
        self._unsubscribe_each(list(self._held), EndReason.SERVER_STOPPING)
        return [subscription.ended for subscription in list(self._ended.values())]

    def _unsubscribe_each(self, idents: Iterable[str], reason: EndReason) -> None:
        for ident in idents:
            try:
                self.unsubscribe(ident, reason)
            except Exception:  # noqa: BLE001 - the others are to end as well
                _log.exception("subscription %s did not end cleanly", ident)

    def get(self, ident: str) -> Subscription:
        """Return a subscription that lives, or ended a moment ago. Raises UnknownSubscriptionError."""
        held = self._held.get(ident)
        found = held.subscription if held else self._ended.get(ident)
        if found is None:
            raise UnknownSubscriptionError(ident)
        return found

    def all(self) -> list[tuple[Subscription, bool, float]]:
        """Return each subscription, whether a stream is open, and the seconds that are left of its lease."""
        return [
            (held.subscription, held.streams > 0, self._leases.seconds_left(held)) for held in list(self._held.values())
        ]

    def stream_opened(self, ident: str) -> None:
        """A stream holds the lease, unless the subscription ended."""
        if held := self._held.get(ident):
            self._leases.stream_opened(held)

    def stream_closed(self, ident: str) -> None:
        if held := self._held.get(ident):
            self._leases.stream_closed(held)

    def _expire(self, ident: str) -> None:
        _log.info("subscription %s: its lease ran out", ident)
        self.unsubscribe(ident, EndReason.LEASE_EXPIRED)

    def revoke(self, is_allowed: Callable[[Subscription], bool]) -> int:
        """End the subscriptions that are not allowed any more. Return how many."""
        ended = [held.subscription.id for held in self._held.values() if not is_allowed(held.subscription)]
        self._unsubscribe_each(ended, EndReason.ACCESS_REVOKED)
        return len(ended)

    def _on_change(self, change: Change) -> None:
        failure: OSError | None = None
        for held in list(self._held.values()):
            try:
                self._armer.consider(held, change.object)
            except OSError as error:
                failure = failure or error
            except Exception:  # noqa: BLE001 - the others are to have it armed as well
                _log.exception("%s: %s could not be armed", held.subscription.id, change.object.path)
        if failure is not None:
            raise failure

    def _on_write(self, written: set[ObjectKey]) -> None:
        """Disarm files before anyone maps their new content; those whose probes did not change, for a moment."""
        for held in list(self._held.values()):
            for key in written & held.considered.keys():
                found = held.considered[key].object
                self._armer.disarm(held, found, is_awaited=True)
                # not before that was told
                self._armer.when_quiesced(held.subscription.client, partial(self._consider_later, held, found))

    def _consider_later(self, held: Held, found: Object) -> None:
        self._loop.call_later(_HOUSEKEEPING_SECONDS, self._consider_again, held, found)

    def _consider_again(self, held: Held, found: Object) -> None:
        if held.subscription.id in self._held:
            self._armer.consider(held, found)

    def _look_at_foreign_hits(self) -> None:
        """Disarm what costs too much for processes that its client does not see, and arm again what may be again."""
        self._looking = self._loop.call_later(_LOOK_SECONDS, self._look_at_foreign_hits)
        hits: Counter[tuple[str, ObjectKey]] = Counter()
        for (subscription_key, key), count in self._engine.foreign_hits().items():
            if principal := self._principal_of.get(subscription_key):
                hits[principal.name, key] += count
        quotas = {each.name: each.quotas.max_foreign_hits_per_second for each in self._principal_of.values()}
        bounds = {name: most for name, most in quotas.items() if most is not None}
        for name, excess in self.foreign.look(hits, bounds):
            _log.warning("%s: %s", name, excess.reason)
            for held in [held for held in self._held.values() if held.subscription.client.name == name]:
                if excess.key in held.considered:
                    self._armer.bar(held, excess)
        self.foreign.forget()
        self._principal_of = {
            held.subscription.subscription_key: held.subscription.client for held in self._held.values()
        }
        for held in list(self._held.values()):
            for key, found in list(held.barred.items()):
                if self.foreign.why_not(held.subscription.client.name, key) is None:
                    del held.barred[key]
                    self._armer.consider(held, found)

    def _keep_house(self) -> None:
        """An armed event holds its object's file. Nothing reports munmap, so memfds and deleted files are looked at."""
        self._housekeeping = self._loop.call_later(_HOUSEKEEPING_SECONDS, self._keep_house)
        self._engine.retry_cleanup()
        volatile = {
            key: considered.object
            for held in self._held.values()
            for key, considered in held.considered.items()
            if not self._armer.is_host_file(considered.object)
        }
        self._watcher.look_at({pid for key in volatile for pid in self._registry.mappings(key)})
        for held in list(self._held.values()):
            for found in [found for key, found in volatile.items() if key in held.considered]:
                self._armer.consider(held, found)
