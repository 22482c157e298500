"""Periodic work for all subscriptions: whatever nothing reports."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from stapsdtd.capture.engine import Engine, SubscriptionKey
from stapsdtd.catalog.registry import Registry
from stapsdtd.model import Object, ObjectKey
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.fair_thread import FairThread
from stapsdtd.runtime.futures import once_done
from stapsdtd.runtime.logs import fields
from stapsdtd.runtime.slices import TURN_SECONDS, Turn
from stapsdtd.runtime.timer import Timer
from stapsdtd.sessions.armer import Armer
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.follower import ObjectFollower
from stapsdtd.sessions.foreign_bounds import ForeignBounds
from stapsdtd.sessions.live import LiveSubscription
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.sweeping import Sweeping

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_CLEANUP_SECONDS = 2.0
_IDLE_CLEANUP_SECONDS = 10.0
"""While nobody subscribes, when all that may be left is what the kernel refused to remove."""
_PROGRESS_SECONDS = 1.0
_PAUSE_SECONDS = 4 * TURN_SECONDS
"""Between steps of what may be much and is not urgent."""


class Housekeeping:
    """Runs on an event loop."""

    def __init__(  # noqa: PLR0917 - what it looks at
        self,
        live: Mapping[str, LiveSubscription],
        registry: Registry,
        watcher: Watcher,
        armer: Armer,
        follower: ObjectFollower,
        foreign: ForeignBounds,
        engine: Engine,
        arming_thread: FairThread,
        sweeping: Sweeping,
    ) -> None:
        """live: the live subscriptions, by id."""
        self._loop = asyncio.get_running_loop()
        self._live = live
        self._registry = registry
        self._watcher = watcher
        self._armer = armer
        self._follower = follower
        self._foreign = foreign
        self._engine = engine
        self._arming_thread = arming_thread
        self._sweeping = sweeping
        self._principal_of: dict[SubscriptionKey, Principal] = {}
        self._closed: list[Subscription] = []
        self._foreign_hits: Future[dict[tuple[SubscriptionKey, ObjectKey], int]] | None = None
        self._cleanup: Future[None] | None = None
        self._is_looking = False
        self._progress_timer = Timer(_PROGRESS_SECONDS, self._on_progress_timer)
        self._cleanup_timer = Timer(_CLEANUP_SECONDS, self._on_cleanup_timer)
        self._idle_cleanup_timer = Timer(_IDLE_CLEANUP_SECONDS, self._on_cleanup_timer)

    def stop(self) -> None:
        self._progress_timer.cancel()
        self._cleanup_timer.cancel()
        self._idle_cleanup_timer.cancel()

    def _on_progress_timer(self) -> None:
        if self._principal_of:
            self._progress_timer.set()
            self.check_progress()

    def _on_cleanup_timer(self) -> None:
        (self._cleanup_timer if self._principal_of else self._idle_cleanup_timer).set()
        self.clean_up()

    def began(self, subscription: Subscription) -> None:
        """Count the subscription's foreign hits, even those of its last interval if it ends."""
        if not self._principal_of:
            # the first rate is not to be of all the time in which nobody subscribed
            self._foreign.judge({}, {})
        self._principal_of |= dict.fromkeys((clause.key for clause in subscription.clauses), subscription.client)
        self._progress_timer.set()
        self._cleanup_timer.set()

    def closed(self, subscription: Subscription) -> None:
        """Forget a subscription after the next count of foreign hits, which is the last with hits of it."""
        self._closed.append(subscription)

    def check_progress(self) -> None:
        """Report what is late, and count hits in processes that clients may not trace."""
        pairing: dict[str, list[Clause]] = {}
        for live in self._live.values():
            # Subscribe reports what it waits for
            if live.first is None:
                self._armer.late.report(live)
                for considered in list(live.considered.values()):
                    # its process may have ended before anybody saw what it maps
                    self._armer.reveal_fired(live, considered)
            of_client = pairing.setdefault(live.subscription.client.name, [])
            of_client += (clause for clause in live.subscription.clauses if clause.pairing is not None)
        self._sweeping.keep_only(pairing.keys())
        for client, clauses in pairing.items():
            if clauses:
                self._sweeping.begin(client, clauses)
        if self._foreign_hits is None or self._foreign_hits.done():
            self._foreign_hits = self._arming_thread.submit(None, self._engine.foreign_hits, "counting foreign hits")
            closed, self._closed = self._closed, []
            once_done(self._foreign_hits, partial(self._on_foreign_hits, closed))

    def _on_foreign_hits(
        self, closed: list[Subscription], done: Future[dict[tuple[SubscriptionKey, ObjectKey], int]]
    ) -> None:
        if done.exception():
            _log_error(done)
        else:
            self._loop.call_soon_threadsafe(partial(self._judge_foreign_hits, done.result(), closed))

    def _judge_foreign_hits(
        self, counts: Mapping[tuple[SubscriptionKey, ObjectKey], int], closed: Iterable[Subscription]
    ) -> None:
        """Disarm objects that cost other users' processes too much, and arm again those whose time is up."""
        hits: Counter[tuple[str, ObjectKey]] = Counter()
        for (subscription_key, key), count in counts.items():
            if principal := self._principal_of.get(subscription_key):
                hits[principal.name, key] += count
        quotas = {each.name: each.quotas.max_foreign_hits_per_second for each in self._principal_of.values()}
        limits = {name: limit for name, limit in quotas.items() if limit is not None}
        for name, excess in self._foreign.judge(hits, limits):
            reason = excess.why_refused if excess.is_refused else excess.why_confined
            _log.warning("%s", reason, extra=fields(client=name))
            for live in [live for live in self._live.values() if live.subscription.client.name == name]:
                if considered := live.considered.get(excess.key):
                    self._follower.consider(live, considered.object)
        self._foreign.forget()
        for subscription in closed:
            for clause in subscription.clauses:
                self._principal_of.pop(clause.key, None)
        for live in list(self._live.values()):
            for key, obj in list(live.barred.items()):
                if self._foreign.excess(live.subscription.client.name, key) is None:
                    del live.barred[key]
                    self._follower.consider(live, obj)

    def clean_up(self) -> None:
        """Retry what failed, and look for memfds and deleted files that nobody maps any more.

        Nothing reports munmap, and an armed event holds its object's file.
        """
        if self._cleanup is None or self._cleanup.done():
            self._cleanup = self._arming_thread.submit(None, self._engine.retry_cleanup, "cleaning up")
            self._cleanup.add_done_callback(_log_error)
        if not self._is_looking:
            self._is_looking = True
            self._take_step(self._look_for_unmapped())

    def _take_step(self, steps: Generator[None, None, None]) -> None:
        """Take a step, and the next one after a pause."""
        try:
            next(steps)
        except StopIteration:
            self._is_looking = False
        except BaseException:
            self._is_looking = False
            raise
        else:
            self._loop.call_later(_PAUSE_SECONDS, self._take_step, steps)

    def _look_for_unmapped(self) -> Generator[None, None, None]:
        """Consider, in steps, objects whose end nobody reports."""
        volatile: dict[ObjectKey, Object] = {}
        pids: set[int] = set()
        turn = Turn()
        for live in list(self._live.values()):
            for key, considered in list(live.considered.items()):
                obj = considered.object
                if key not in volatile and not obj.is_kernel and not self._follower.is_host_file(obj):
                    volatile[key] = obj
                    pids.update(self._registry.mappings(key))
                if turn.is_over:
                    yield
                    turn.begin()
        self._watcher.look_at(pids)
        for ident, live in list(self._live.items()):
            if ident in self._live:
                self._follower.consider_pending(live)
            for key, obj in volatile.items():
                # it may have ended meanwhile
                if key in live.considered and ident in self._live:
                    self._follower.consider(live, obj)
                if turn.is_over:
                    yield
                    turn.begin()


def _log_error(done: Future[_T]) -> None:
    if error := done.exception():
        _log.error("the engine failed in periodic work, which is tried again", exc_info=error)
