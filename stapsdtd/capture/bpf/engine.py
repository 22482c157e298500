"""The bpf engine: one attachment for all subscriptions of a site, and one record for each hit.

    consumers of all subscriptions ──► scope ──► groups (tracefs events, patched processes)
                                   └─► values, filters ──► plan (what the program does at the site)

`plan.attachments` and `site_plans` decide what has to change; this module decides in which order.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.armed import ArmedObject, ArmedSite, Consumer
from stapsdtd.capture.bpf.constants import ReadOnlyFile
from stapsdtd.capture.bpf.encode import Filter
from stapsdtd.capture.bpf.endings import Endings
from stapsdtd.capture.bpf.foreign import ForeignHits
from stapsdtd.capture.bpf.groups import Groups, MakeEvent
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.capture.bpf.ring_set import RingSet
from stapsdtd.capture.bpf.site_plans import SitePlan, source_of
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.bpf.turns import MAX_EPHEMERAL
from stapsdtd.capture.engine import EngineMetrics, Refusal, Sink, SubscriptionKey, Target, TargetSite, UnreadMetrics
from stapsdtd.capture.names import Owner
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Argument, Capture, Object, ObjectKey, Unavailable
from stapsdtd.model import Site as ModelSite
from stapsdtd.query.program import compile_for

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Subscription:
    channel: Channel
    buffer_bytes: int
    owner: str
    sites: dict[ObjectKey, list[ArmedSite]] = field(default_factory=dict)


class BpfEngine:
    """See `capture.engine.Engine`.

    A site is armed once, for all processes that any subscription wants; the program decides which subscriptions want a
    hit. When consumers come or go, a new plan replaces the old one in the site's slot. When fewer processes or sites
    are wanted, a new group is armed before the old one goes, and the slot says which of them counts.
    """

    name = "bpf"

    def __init__(
        self,
        tracefs: Tracefs,
        owner: Owner,
        loaded: Loaded,
        paging: Paging,
        max_buffer_bytes: int = 1 << 40,
        *,
        make_event: MakeEvent | None = None,
    ) -> None:
        """max_buffer_bytes: of all rings together."""
        self._tracefs = tracefs
        self._loaded = loaded
        self._tables = Tables(loaded.table, loaded.cpus)
        self._paging = paging
        self._reader = Reader(self._tables, loaded.set_reader_waits, paging.request)
        self._endings = Endings(loaded.wait_for_hits, self._reader.end)
        self._reaper = EventReaper()
        self._groups = Groups(
            owner, loaded.program, self._tables, self._reaper, make_event or partial(ProbeEvent, tracefs)
        )
        self._rings = RingSet(loaded, self._reader, max_buffer_bytes)
        self._foreign = ForeignHits(self._tables)
        self._subscriptions: dict[SubscriptionKey, _Subscription] = {}
        self._objects: dict[ObjectKey, ArmedObject] = {}

    def why_not(self, capture: Capture, argument: Argument, architecture: str) -> str | None:
        source = source_of(capture, argument, architecture)
        return source.reason if isinstance(source, Unavailable) else None

    def open(self, subscription_key: SubscriptionKey, sink: Sink, kernel_buffer_kib: int, owner: str = "") -> None:
        buffer_bytes = kernel_buffer_kib * 1024 * len(online_cpus())
        self._subscriptions[subscription_key] = _Subscription(Channel(subscription_key, sink), buffer_bytes, owner)
        # make the ring now: that takes the kernel a while, and the first site to be armed should not wait for it
        with contextlib.suppress(OSError):
            self._rings.provide([0], buffer_bytes)

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        subscription = self._subscriptions[subscription_key]
        reason = self._reaper.why_not(target.owner, MAX_EPHEMERAL) if target.is_ephemeral else None
        if reason := reason or self._reaper.why_not(subscription.owner):
            return [Refusal(wanted.site, reason) for wanted in target.sites]
        armed = self._object(target)
        subscription.channel.excluded |= target.exclude_pids | target.exclude_later
        refusals: dict[ModelSite, str] = {}
        sites = []
        for wanted in target.sites:
            try:
                site = self._site(armed, wanted.site)
                site.consumers[subscription_key] = Consumer(subscription.channel, wanted, _filter(target, wanted))
            except (TableFullError, ValueError) as error:
                refusals[wanted.site] = str(error)
            else:
                sites.append(site)
        try:
            refused = self._reconcile(sites, subscription.owner, subscription_key)
        except BaseException:
            # do not try this one again whenever other subscriptions' wishes for these sites change
            self._release(subscription_key, sites, is_awaited=False)
            raise
        subscription.sites[armed.key] = [site for site in sites if subscription_key in site.consumers]
        self._forget_unwanted(armed)
        refusals |= {site.site: refused[site] for site in sites if site in refused}
        return [Refusal(site, reason) for site, reason in refusals.items()]

    def disarm(self, subscription_key: SubscriptionKey, target: Object, *, is_awaited: bool = False) -> None:
        self._release(
            subscription_key, self._subscriptions[subscription_key].sites.pop(target.key, []), is_awaited=is_awaited
        )

    def close(self, subscription_key: SubscriptionKey) -> Future[None]:
        subscription = self._subscriptions[subscription_key]
        self._release(
            subscription_key, [site for sites in subscription.sites.values() for site in sites], is_awaited=True
        )
        del self._subscriptions[subscription_key]
        if not self._subscriptions:
            self._rings.drop_large()
        return self._endings.begin([], [subscription.channel])

    def _release(self, subscription_key: SubscriptionKey, sites: Sequence[ArmedSite], *, is_awaited: bool) -> None:
        for site in sites:
            # an earlier attempt that ran out of memory may have removed it
            site.consumers.pop(subscription_key, None)
        owner = self._subscriptions[subscription_key].owner
        for site, reason in self._reconcile(sites, owner, is_awaited=is_awaited).items():
            _log.warning("%s: %s stays armed as it was: %s", site.object.path, site.site.name, reason)
        for armed in {site.object for site in sites}:
            self._forget_unwanted(armed)

    def ask(self) -> Future[None]:
        return self._reader.ask()

    def problem(self) -> str | None:
        return self._reader.problem() or self._tracefs.problem()

    def metrics(self) -> EngineMetrics:
        sites = [site for armed in list(self._objects.values()) for site in list(armed.sites.values())]
        groups = [site.group for site in sites if site.group is not None]
        strays = int(self._tables.totals()[layout.STRAY_HITS]) + self._reader.unknown
        paging = self._paging.metrics()
        unread = UnreadMetrics(
            self._reader.from_file, self._reader.unavailable, paging.touched, paging.refused, paging.stuck
        )
        return EngineMetrics(len(groups), len({id(group) for group in groups}), self._rings.metrics(), strays, unread)

    def quiesced(self, owner: str = "") -> Future[None]:
        return self._reaper.quiesced(owner)

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        return self._foreign.take()

    def retry_cleanup(self) -> None:
        self._reaper.try_again()

    def shutdown(self) -> None:
        with contextlib.ExitStack() as steps:
            steps.callback(self._loaded.close)
            steps.callback(self._reader.stop)
            steps.callback(self._reaper.finish)
            steps.callback(self._endings.finish)
            for subscription_key in list(self._subscriptions):
                steps.callback(self.close, subscription_key)

    def _object(self, target: Target) -> ArmedObject:
        key = target.object.key
        armed = self._objects.get(key)
        if armed is None:
            descriptor = os.open(target.file_path, os.O_RDONLY | os.O_CLOEXEC)
            parsed = target.object.parsed
            constants = ReadOnlyFile(descriptor, parsed.read_only)
            armed = ArmedObject(key, target.object.path, parsed.architecture, descriptor, target.owner, constants)
            self._objects[key] = armed
            with contextlib.suppress(OSError):
                constants.read_ahead()
        return armed

    def _site(self, armed: ArmedObject, site: ModelSite) -> ArmedSite:
        """Raises TableFullError."""
        armed_site = armed.sites.get(site)
        if armed_site is None:
            armed_site = armed.sites[site] = ArmedSite(armed, site, self._tables.allocate_slot())
        return armed_site

    def _forget_unwanted(self, armed: ArmedObject) -> None:
        for site in [site for site in armed.sites.values() if not site.consumers and site.group is None]:
            self._tables.free_slot(site.slot)
            del armed.sites[site.site]
        if not armed.sites and self._objects.pop(armed.key, None) is not None:
            # records of plans that ended before may still need constants from the file
            self._endings.begin([]).add_done_callback(lambda _: os.close(armed.descriptor))

    def _reconcile(
        self,
        sites: Sequence[ArmedSite],
        owner: str,
        newcomer: SubscriptionKey | None = None,
        *,
        is_awaited: bool = False,
    ) -> dict[ArmedSite, str]:
        """Arm, plan and disarm as the consumers of some sites now require. Return which sites were refused, and why.

        Those keep their group and plan, and lose the newcomer as a consumer. They may include further sites, which had
        to move to another group. owner: of the events to be removed, see `turns`.
        """
        refused: dict[ArmedSite, str] = {}
        for plan in self._endings.collect():
            self._tables.free_plan(plan.entry)
        plans = self._new_plans(sites, refused)
        _forget_consumers(newcomer, refused)
        if plans:
            self._reader.begin(plans.values())
        superseded = self._groups.regroup(sites, plans, refused)
        _forget_consumers(newcomer, refused)
        ended = [plan for site, plan in plans.items() if site in refused]
        ended += self._switch(
            dict.fromkeys([*sites, *(site for group in superseded for site in group.sites)]),
            {site: plan for site, plan in plans.items() if site not in refused},
        )
        for group in superseded:
            self._groups.detach(group, owner, is_awaited=is_awaited)
        if ended:
            self._endings.begin(ended)
        return refused

    def _new_plans(self, sites: Iterable[ArmedSite], refused: dict[ArmedSite, str]) -> dict[ArmedSite, ActivePlan]:
        """Make plans before anything is armed or moved: a refusal changes nothing, and every hit finds its plan."""
        plans = {}
        for site in sites:
            if site.is_wanted:
                try:
                    plans[site] = self._plan(site)
                except (TableFullError, OSError, ValueError) as error:
                    refused[site] = str(error)
        return plans

    def _switch(self, sites: Iterable[ArmedSite], plans: Mapping[ArmedSite, ActivePlan]) -> list[ActivePlan]:
        """Point the sites' slots to their groups and new plans. Return the plans that were replaced."""
        ended = []
        for site in sites:
            plan = plans.get(site, site.plan if site.consumers else None)
            if plan is None or site.group is None:
                self._tables.set_slot(site.slot, 0, 0)
            else:
                self._tables.set_slot(site.slot, site.group.first, plan.entry.id)
            if site.plan is not None and site.plan is not plan:
                ended.append(site.plan)
                self._foreign.end(site.plan)
            if plan is not None and site.plan is not plan:
                self._foreign.begin(site.object.key, plan, site.keys_with_foreign_hits)
            site.plan = plan
        return ended

    def _plan(self, site: ArmedSite) -> ActivePlan:
        """Raises TableFullError, ValueError and, if there is no memory for a ring, OSError."""
        plan = SitePlan.of(site)
        buffer_bytes = max(subscription.buffer_bytes for subscription in self._subscriptions.values())
        self._rings.provide(plan.emission.record_classes, buffer_bytes)
        return plan.active(self._tables.allocate_plan(plan.spec))


def _forget_consumers(subscription_key: SubscriptionKey | None, sites: Iterable[ArmedSite]) -> None:
    if subscription_key is not None:
        for site in sites:
            site.consumers.pop(subscription_key, None)


def _filter(target: Target, wanted: TargetSite) -> Filter:
    """Raises ValueError if the predicate does not fit the site."""
    program = None if target.predicate is None else compile_for(target.predicate, wanted.site)
    return Filter(wanted.pids, frozenset(target.exclude_pids), program, target.owners)
