"""All subscriptions: how they begin, and what may make them end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from stapsdtd.capture.engine import Engine, SubscriptionKey
from stapsdtd.catalog.registry import Registry
from stapsdtd.config import NO_QUOTAS, Limits, Quotas
from stapsdtd.errors import ServerStoppingError, UnknownSubscriptionError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import Object
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.procs.objects import Parse, open_object
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.fair_thread import FairThread
from stapsdtd.runtime.wall_clock import WallClock
from stapsdtd.sessions.admission import DEFAULT_FILE_LIMITS, AdmissionControl, FileLimits
from stapsdtd.sessions.arming import Arming
from stapsdtd.sessions.attacher import Opener
from stapsdtd.sessions.choices import Choices
from stapsdtd.sessions.ending import Ending, EndingSubscriptions
from stapsdtd.sessions.evaluating import Evaluating
from stapsdtd.sessions.housekeeping import Housekeeping
from stapsdtd.sessions.installed import DEFAULT_LIMITS as DEFAULT_INSTALLED_LIMITS
from stapsdtd.sessions.installed import InstalledFiles, InstalledLimits
from stapsdtd.sessions.installed import Opener as InstalledOpener
from stapsdtd.sessions.lifetimes import Lifetimes
from stapsdtd.sessions.live import FirstArming, LiveSubscription
from stapsdtd.sessions.own_clients import ConnectedClients
from stapsdtd.sessions.session import Session
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.sessions.subscription import EndReason, SiteStatus, Subscription
from stapsdtd.sessions.sweeping import Sweeping
from stapsdtd.sessions.totals import AccountTotals

_log = logging.getLogger(__name__)

_ENDED_KEPT_SECONDS = 10.0


class Subscriptions:
    """Runs on the control thread's event loop; `get` and `all` may be called from any thread.

    arming: of what is wanted. lifetimes: when subscriptions end by themselves, which open streams put off. totals: any
    thread may read them.
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
        matching_thread: FairThread,
        evaluating: Evaluating,
        connected: ConnectedClients,
        nops: NopRewriting,
        filesystems: Filesystems,
        wall_clock: WallClock | None = None,
        installed: InstalledFiles | None = None,
        installed_opener: InstalledOpener | None = None,
        installed_limits: InstalledLimits = DEFAULT_INSTALLED_LIMITS,
        file_limits: FileLimits = DEFAULT_FILE_LIMITS,
        open_object: Opener = open_object,
        ended_kept_seconds: float = _ENDED_KEPT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """arming_thread: the only one that calls the engine to arm and disarm. matching_thread: finds out which sites
        selectors mean. evaluating: what engines do not test. wall_clock: of all subscriptions. installed: files that
        are armed before a process maps them, which installed_opener opens. ended_kept_seconds: how long the events of
        an ended subscription may be read.
        """
        self._connected = connected
        self._engine = engine
        self._evaluating = evaluating
        self._wall_clock = wall_clock or WallClock()
        self._watcher = watcher
        self._file_limits = file_limits
        self._call_soon = asyncio.get_running_loop().call_soon_threadsafe
        self._subscription_keys = itertools.count(1)
        self._live: dict[str, LiveSubscription] = {}
        self._closing = False
        self.totals = AccountTotals()
        self._admission = AdmissionControl(limits)
        self.arming = Arming(
            self._live,
            registry,
            engine,
            watcher,
            parse,
            arming_thread=arming_thread,
            matching_thread=matching_thread,
            nops=nops,
            filesystems=filesystems,
            installed=installed,
            installed_opener=installed_opener,
            installed_limits=installed_limits,
            open_object=open_object,
            clock=clock,
        )
        self.lifetimes = Lifetimes(self._live, self.unsubscribe)
        watcher.on_main_thread(self._on_main_thread)
        armer, follower = self.arming.armer, self.arming.follower
        self._ending = EndingSubscriptions(armer, self.totals, self._call_soon, self._on_closed, ended_kept_seconds)
        self.housekeeping = Housekeeping(
            self._live,
            registry,
            watcher,
            armer,
            follower,
            self.arming.foreign,
            engine,
            arming_thread,
            Sweeping(engine, matching_thread),
        )

    def subscribe(
        self,
        spec: SubscriptionSpec,
        client: str = "",
        quotas: Quotas = NO_QUOTAS,
        files: Sequence[NamedFile] = (),
        functions: Sequence[Object] = (),
    ) -> tuple[Subscription, FirstArming]:
        """Begin to arm all sites that match now. client: names the owner, whose subscriptions share its quotas.

        files: are armed whether or not a process maps them. functions: of the kernel, from which selectors choose, too.

        Wait for it to be matched, and then armed; see first_statuses(). It has an error if the engine cannot open the
        subscription, or there is a defect. Raises LimitReachedError, and InvalidArgumentError if there is no such
        process as its scope names.
        """
        if self._closing:
            raise ServerStoppingError
        refreshed = self._watcher.refresh(spec.owners, frozenset(spec.scope.pids or ()))
        ident = secrets.token_hex(8)
        held = ((live.subscription.client.name, file) for live in self._live.values() for file in live.named_files())
        self._file_limits.check(client, files, held)
        # which may end some
        unfollow = self.lifetimes.follow(ident, spec.scope.pids)
        others = [live.subscription for live in self._live.values()]
        try:
            principal = self._admission.admit(spec.queue_bytes, client, quotas, others, self._ending.all())
            subscription = Subscription(
                ident,
                self._subscription_keys,
                spec,
                os.getpid(),
                self._engine.why_not,
                principal,
                self._connected,
                engine_pairs=self._engine_pairs,
                open_in_engine=self._engine.open_spans,
                evaluating=self._evaluating,
                wall_clock=self._wall_clock,
            )
        except BaseException:
            unfollow()
            raise
        first = FirstArming()
        choices = Choices(spec.clauses, spec.excluded_probes)
        live = LiveSubscription(subscription, Session(subscription), unfollow, choices, first=first)
        self._live[subscription.id] = live
        self._evaluating.began(client)
        self.housekeeping.began(subscription)
        self.totals.began(subscription)
        try:
            first.add()
            refreshed.add_done_callback(lambda _: self._call_soon(first.settle))
            self.arming.begin(live, first, files, functions)
        except BaseException:
            self.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)
            raise
        return subscription, first

    def _engine_pairs(self, clause: ClauseSpec) -> bool:
        """Report whether the engine makes the pairs of a clause's span."""
        if clause.span is None or not clause.is_tested:
            return False
        return self._engine.why_not_paired(clause.span.span) is None

    def first_statuses(self, ident: str) -> list[SiteStatus]:
        """Return the statuses of the sites that matched at first, once; later ones go to the stream. The lease begins.

        Raises UnknownSubscriptionError.
        """
        live = self._live.get(ident)
        if live is None:
            raise UnknownSubscriptionError(ident)
        self.arming.armer.late.report(live, seconds=0)
        # not before: the client cannot open a stream while Subscribe arms
        self.lifetimes.start(live)
        statuses = live.first.statuses if live.first else []
        live.first = None
        return statuses

    def unsubscribe(self, ident: str, reason: EndReason) -> Ending:
        """Disarm what only this subscription used. Its `ended` is done when its log has all that fired.

        The log can still be read for some seconds after that, even by a new stream. If it ended by itself a moment ago,
        return that ending. Raises UnknownSubscriptionError.
        """
        live = self._live.get(ident)
        if live is None:
            if ending := self._ending.get(ident):
                return ending
            raise UnknownSubscriptionError(ident)
        # in this order, since another thread may look for it in between
        self._ending.add(live.subscription)
        del self._live[ident]
        self.lifetimes.stop(live)
        ending = self._ending.begin(live, reason, self.arming.unmapped(live))
        self.arming.follower.end(live)
        return ending

    def _on_closed(self, subscription: Subscription) -> None:
        self.housekeeping.closed(subscription)
        self._evaluating.ended(subscription.client.name)
        # what waits to be closed takes memory yet
        self._admission.release(subscription.client, subscription.spec.queue_bytes)

    def _on_main_thread(self, pid: int) -> None:
        # what executes a program may be another process by now
        self.lifetimes.notice_end(pid)
        self.arming.follower.on_main_thread(pid)

    def close_all(self) -> list[Future[None]]:
        """Unsubscribe all. The futures are done when the logs have all that fired."""
        self._closing = True
        self._evaluating.hurry()
        self.housekeeping.stop()
        self.arming.stop()
        self._unsubscribe_each(list(self._live), EndReason.SERVER_STOPPING)
        return [subscription.ended for subscription in self._ending.all()]

    def _unsubscribe_each(self, idents: Iterable[str], reason: EndReason) -> None:
        for ident in idents:
            try:
                self.unsubscribe(ident, reason)
            except Exception:  # noqa: BLE001 - the others are to end as well
                _log.exception("subscription %s did not end cleanly", ident)

    def collect(self, subscription_key: SubscriptionKey) -> Future[int]:
        """See `Engine.collect`."""
        return self._engine.collect(subscription_key)

    def get(self, ident: str) -> Subscription:
        """Return a subscription that is live or ended a moment ago. Raises UnknownSubscriptionError."""
        live = self._live.get(ident)
        if kept := live or self._ending.get(ident):
            return kept.subscription
        raise UnknownSubscriptionError(ident)

    def all(self) -> list[tuple[Subscription, bool, float]]:
        """Return each live subscription, whether a stream is open, and the seconds left of its lease."""
        return [
            (live.subscription, live.streams > 0, self.lifetimes.seconds_left(live))
            for live in list(self._live.values())
        ]

    def revoke(self, is_allowed: Callable[[Subscription], bool]) -> int:
        """End the subscriptions that are not allowed any more. Return how many."""
        ended = [live.subscription.id for live in self._live.values() if not is_allowed(live.subscription)]
        self._unsubscribe_each(ended, EndReason.ACCESS_REVOKED)
        return len(ended)
