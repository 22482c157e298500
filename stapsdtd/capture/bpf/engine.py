"""The bpf engine: one attachment for all subscriptions of a site, and one record for each hit.

This module keeps track of subscriptions; `arming` of who wants which sites, and `reconciler` arms them accordingly.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from concurrent.futures import Future

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.capture.bpf import layout, pairs
from stapsdtd.capture.bpf.armed_objects import ArmedObjects
from stapsdtd.capture.bpf.arming import Arming
from stapsdtd.capture.bpf.chains import Chains
from stapsdtd.capture.bpf.consumers import Consumers
from stapsdtd.capture.bpf.draining import Drainer
from stapsdtd.capture.bpf.endings import Endings
from stapsdtd.capture.bpf.following import FollowedProcesses, Following
from stapsdtd.capture.bpf.foreign import ForeignHits
from stapsdtd.capture.bpf.groups import Attachments, Groups
from stapsdtd.capture.bpf.hit_tables import HitTables
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.missed import MissedCalls
from stapsdtd.capture.bpf.open_spans import open_in
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.capture.bpf.recipes import why_not
from stapsdtd.capture.bpf.reconciler import Reconciler
from stapsdtd.capture.bpf.ring_set import RingSet
from stapsdtd.capture.bpf.span_tables import SpanTables
from stapsdtd.capture.bpf.span_watch import SpanWatch
from stapsdtd.capture.bpf.subjects import source_of
from stapsdtd.capture.bpf.subscriptions import Subscription, Subscriptions
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.engine import (
    EngineMetrics,
    Refusal,
    RowSink,
    Sink,
    SubscriptionKey,
    Target,
    UnreadMetrics,
)
from stapsdtd.capture.names import Owner
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Argument, BuiltIn, Capture, Object, ObjectKey, Unavailable
from stapsdtd.model import Site as ModelSite
from stapsdtd.runtime.shares import Toll
from stapsdtd.runtime.slices import Turn
from stapsdtd.spans.span import NO_OPEN_SPANS, OpenSpans, Span

_log = logging.getLogger(__name__)

_RELEASED_AT_ONCE = 64
_FREED_WHEN_CLEANING = 2048
"""Plans: some 5 ms."""


class BpfEngine:
    """See `capture.engine.Engine`."""

    name = "bpf"

    def __init__(
        self,
        tracefs: Tracefs,
        owner: Owner,
        loaded: Loaded,
        paging: Paging,
        max_buffer_bytes: int = 1 << 40,
        *,
        toll: Toll | None = None,
        attachments: Attachments | None = None,
        tables: Tables | None = None,
        reaper: EventReaper | None = None,
    ) -> None:
        """max_buffer_bytes: of all rings together. toll: for reading clients' events. attachments: by default,
        kernel functions take an event each.
        """
        self._tracefs = tracefs
        self._loaded = loaded
        self._tables = tables or Tables(loaded.table, loaded.cpus)
        self._paging = paging
        self._reader = Reader(self._tables, loaded.set_reader_waits, paging.request, toll)
        self._memory = TableMemory()
        self._hit_tables = HitTables(loaded, self._memory)
        self._spans = SpanTables(loaded, self._memory)
        watch = SpanWatch(self._spans, self._reader.post_behind_counters)
        self._drainer = Drainer(loaded, self._hit_tables, watch, self._reader.post, self._reader.end)
        self._chains = Chains(loaded, self._memory)
        self._endings = Endings(loaded.wait_for_hits, self._end)
        self._reaper = reaper or EventReaper()
        groups = Groups(owner, self._tables, self._reaper, attachments or Attachments.of(loaded, tracefs, frozenset))
        self._rings = RingSet(loaded, self._reader, max_buffer_bytes)
        self._foreign = ForeignHits(self._tables)
        self._missed = MissedCalls(tracefs, self._reader.post)
        self._following = Following(loaded)
        self._subscriptions = Subscriptions()
        self._reconciler = Reconciler(
            tables=self._tables,
            rings=self._rings,
            reader=self._reader,
            groups=groups,
            endings=self._endings,
            foreign=self._foreign,
            hit_tables=self._hit_tables,
            spans=self._spans,
            chains=self._chains,
            subscriptions=self._subscriptions,
        )
        self._objects = ArmedObjects(self._tables, self._endings)
        self._arming = Arming(
            subscriptions=self._subscriptions,
            objects=self._objects,
            consumers=Consumers(self._drainer, self._spans, self._chains),
            groups=groups,
            reconciler=self._reconciler,
            reaper=self._reaper,
            missed=self._missed,
        )

    def why_not(self, capture: Capture, subject: Argument | BuiltIn, architecture: str) -> str | None:
        source = source_of(capture, subject, architecture)
        return source.reason if isinstance(source, Unavailable) else None

    def why_not_aggregated(self, aggregation: Aggregation, site: ModelSite, architecture: str) -> str | None:
        return why_not(aggregation, site, architecture)

    def why_not_paired(self, span: Span) -> str | None:
        return pairs.why_not(span)

    def open(
        self,
        subscription_key: SubscriptionKey,
        sink: Sink,
        kernel_buffer_kib: int,
        owner: str = "",
        rows: RowSink | None = None,
        *,
        client: str = "",
    ) -> None:
        buffer_bytes = kernel_buffer_kib * 1024 * len(online_cpus())
        channel = Channel(subscription_key, sink, rows=rows, client=client)
        self._subscriptions[subscription_key] = Subscription(channel, buffer_bytes, owner)
        # make the ring now: that takes the kernel a while, and the first site to be armed should not wait for it
        with contextlib.suppress(OSError):
            self._rings.provide([0], buffer_bytes)

    def follow(self, subscription_key: SubscriptionKey, pids: frozenset[int]) -> FollowedProcesses:
        subscription = self._subscriptions[subscription_key]
        subscription.followed = self._following.begin(pids, subscription.owner)
        return subscription.followed

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        return self._arming.arm(subscription_key, target)

    def arm_in_steps(self, subscription_key: SubscriptionKey, target: Target) -> Generator[None, None, list[Refusal]]:
        return self._arming.arm_in_steps(subscription_key, target)

    def renew(self, pid: int) -> None:
        self._arming.renew(pid)

    def disarm(self, subscription_key: SubscriptionKey, target: Object, *, is_awaited: bool = False) -> None:
        sites = self._subscriptions[subscription_key].sites.pop(target.key, [])
        self._arming.release(subscription_key, sites, is_awaited=is_awaited)

    def close_in_steps(self, subscription_key: SubscriptionKey) -> Generator[None, None, Future[None]]:
        subscription, turn = self._subscriptions[subscription_key], Turn()
        with self._reaper.together(subscription.owner):
            while sites := subscription.take_sites(_RELEASED_AT_ONCE):
                yield from self._arming.release_in_steps(subscription_key, sites, turn)
                if turn.is_over:
                    yield
                    turn.begin()
            return self.close(subscription_key)

    def close(self, subscription_key: SubscriptionKey) -> Future[None]:
        subscription = self._subscriptions[subscription_key]
        self._arming.release(subscription_key, subscription.all_sites, is_awaited=True)
        del self._subscriptions[subscription_key]
        if not self._subscriptions:
            self._rings.drop_large()
        self._hit_tables.close(subscription.channel)
        self._spans.close(subscription.channel)
        delivered = self._endings.begin([], [subscription.channel])
        if subscription.followed is not None:
            self._following.end(subscription.followed, delivered)
        self._chains.end(subscription_key, delivered)
        return delivered

    def open_spans(self, subscription_key: SubscriptionKey) -> OpenSpans:
        subscription = self._subscriptions.get(subscription_key)
        tables = self._spans.of([subscription.channel]) if subscription else []
        return open_in(tables[0]) if tables else NO_OPEN_SPANS

    def _end(self, plans: Sequence[ActivePlan], closing: Sequence[Channel]) -> Future[None]:
        """See `Endings`: no hit uses the plans any more."""
        self._drainer.drain_last(closing)
        return self._reader.end(plans, closing)

    def collect(self, subscription_key: SubscriptionKey) -> Future[int]:
        subscription = self._subscriptions.get(subscription_key)
        # it may have been closed meanwhile
        return self._drainer.collect(subscription.channel if subscription else None)

    def ask(self) -> Future[None]:
        return self._reader.ask()

    def problem(self) -> str | None:
        return self._reader.problem() or self._tracefs.problem()

    def metrics(self) -> EngineMetrics:
        groups, rings = self._objects.groups(), self._rings.metrics()
        strays = int(self._tables.totals()[layout.STRAY_HITS]) + self._reader.unknown
        unread = UnreadMetrics(self._reader.from_file, self._reader.unavailable, *self._paging.metrics())
        slices = self._reader.slices
        return EngineMetrics(len(groups), len(set(groups)), rings, slices, strays, unread, self._memory.byte_count)

    def quiesced(self, owner: str = "") -> Future[None]:
        return self._reaper.quiesced(owner)

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        return self._foreign.take()

    def retry_cleanup(self) -> None:
        self._missed.tell(self._objects.groups())
        self._reaper.try_again()
        self._following.collect()
        self._chains.collect()
        self._reconciler.collect(_FREED_WHEN_CLEANING)

    def shutdown(self) -> None:
        with contextlib.ExitStack() as steps:
            steps.callback(self._loaded.close)
            steps.callback(self._following.close)
            steps.callback(self._chains.close)
            steps.callback(self._reader.stop)
            steps.callback(self._drainer.finish)
            steps.callback(self._reaper.finish)
            steps.callback(self._endings.finish)
            for subscription_key in list(self._subscriptions):
                steps.callback(self.close, subscription_key)
