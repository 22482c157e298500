"""Brings what is armed in line with what its consumers want.

    consumers of all subscriptions ──► scope ──► groups (tracefs events, patched processes)
                                   └─► values, filters ──► plan (what the program does at the site)

`plan.attachments` and `site_plans` decide what has to change; this module decides in which order.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence

from stapsdtd.capture.bpf.armed import ArmedSite
from stapsdtd.capture.bpf.chains import Chains
from stapsdtd.capture.bpf.endings import Endings
from stapsdtd.capture.bpf.foreign import ForeignHits
from stapsdtd.capture.bpf.groups import Groups
from stapsdtd.capture.bpf.hit_tables import HitTables
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.prepared import NOTHING, Prepared
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.ring_set import RingSet
from stapsdtd.capture.bpf.site_plans import SitePlan
from stapsdtd.capture.bpf.span_tables import SpanTables
from stapsdtd.capture.bpf.subscriptions import Subscriptions
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.engine import SubscriptionKey
from stapsdtd.kernel.uprobe_links import NoMainThreadError
from stapsdtd.runtime.slices import Turn

_log = logging.getLogger(__name__)

_FREED_AT_ONCE = 256
"""Plans, which takes 0.5 ms, beside as many as there are to be made."""


class Reconciler:
    """Called from one thread.

    A site is armed once, for all processes that any subscription wants; the program decides which subscriptions want a
    hit. When consumers come or go, a new plan replaces the old one in the site's slot. When fewer processes or sites
    are wanted, a new group is armed before the old one goes, and each hit counts in one of them, see `slots`.
    """

    def __init__(
        self,
        *,
        tables: Tables,
        rings: RingSet,
        reader: Reader,
        groups: Groups,
        endings: Endings,
        foreign: ForeignHits,
        hit_tables: HitTables,
        spans: SpanTables,
        chains: Chains,
        subscriptions: Subscriptions,
    ) -> None:
        self._tables = tables
        self._rings = rings
        self._reader = reader
        self._groups = groups
        self._endings = endings
        self._foreign = foreign
        self._hit_tables = hit_tables
        self._spans = spans
        self._chains = chains
        self._subscriptions = subscriptions
        self._ended: deque[ActivePlan] = deque()

    def prepare(self, site: ArmedSite, prepared: Prepared) -> None:
        """Make the plan of a site with the consumers that it is to have, unless that fails now."""
        with contextlib.suppress(TableFullError, OSError, ValueError):
            prepared.add(site, self._plan(site, self._subscriptions.ring_bytes))

    def discard(self, prepared: Prepared) -> None:
        """Free what plans have that no slot ever named."""
        for plan in prepared.take_all():
            self._free(plan)

    def reconcile(
        self,
        sites: Sequence[ArmedSite],
        owner: str,
        newcomer: SubscriptionKey | None = None,
        *,
        is_awaited: bool = False,
        prepared: Prepared = NOTHING,
        turn: Turn | None = None,
    ) -> dict[ArmedSite, str]:
        """Arm, plan and disarm as the consumers of some sites now require. Return which sites were refused, and why.

        Those keep their group and plan, and lose the newcomer as a consumer. They may include further sites, which had
        to move to another group. owner: of the events to be removed, see `turns`. prepared: plans made before. turn:
        see `Groups.regroup`.
        """
        refused: dict[ArmedSite, str] = {}
        self.collect(len(sites) + _FREED_AT_ONCE)
        plans = self._new_plans(sites, refused, prepared)
        _forget_consumers(newcomer, refused)
        if plans:
            self._reader.begin(plans.values())
        before = {site: site.group for site in sites}
        superseded = self._groups.regroup(sites, plans, refused, turn)
        _forget_consumers(newcomer, refused)
        ended = [plan for site, plan in plans.items() if site in refused]
        ended += self._switch(
            dict.fromkeys([*sites, *(site for group in superseded for site in group.sites)]),
            {site: plan for site, plan in plans.items() if site not in refused},
        )
        moved = [site for group in superseded for site in group.sites]
        self._forget_calls(moved + [site for site, group in before.items() if site.group is not group])
        for group in superseded:
            self._groups.detach(group, owner, is_awaited=is_awaited)
        if ended:
            self._endings.begin(ended)
        return refused

    def patch_in_steps(self, sites: Iterable[ArmedSite], owner: str) -> Generator[None, None, dict[ArmedSite, str]]:
        """Have the sites' groups patch what the turn in which they were made had no time for. Return the sites that are
        not armed in all processes that want them, and why.
        """
        refused: dict[ArmedSite, str] = {}
        turn = Turn()
        for site in sites:
            while (group := site.group) is not None and group.unpatched:
                yield
                turn.begin()
                try:
                    self._groups.patch(group, turn)
                except NoMainThreadError:
                    group.is_stale = True
                    refused |= self.reconcile(group.sites, owner)
                except OSError as error:
                    refused[site] = str(error)
                    break
        return refused

    def _forget_calls(self, moved: Iterable[ArmedSite]) -> None:
        """Begin chains anew: of calls that may now be known by other frames, since ways to attach differ in that, and
        of those that were entered before their returns were hit.
        """
        for key in {key for site in moved for key, each in site.consumers.items() if each.filter.link is not None}:
            try:
                self._chains.forget_calls(key)
            except OSError as error:
                _log.warning("calls in progress may be taken for such that led to others: %s", error)

    def collect(self, most: int = _FREED_AT_ONCE) -> None:
        """Free what plans had that have ended, of some of them."""
        self._ended.extend(self._endings.collect())
        for _ in range(min(most, len(self._ended))):
            self._free(self._ended.popleft())

    def _free(self, plan: ActivePlan) -> None:
        self._tables.free_plan(plan.entry)
        self._hit_tables.end(plan)
        self._spans.end(plan)

    def _new_plans(
        self, sites: Iterable[ArmedSite], refused: dict[ArmedSite, str], prepared: Prepared
    ) -> dict[ArmedSite, ActivePlan]:
        """Make plans before anything is armed or moved: a refusal changes nothing, and every hit finds its plan."""
        plans = {}
        ring_bytes = self._subscriptions.ring_bytes
        for site in sites:
            if site.is_wanted:
                try:
                    plans[site] = prepared.take(site) or self._plan(site, ring_bytes)
                except (TableFullError, OSError, ValueError) as error:
                    refused[site] = str(error)
        return plans

    def _plan(self, site: ArmedSite, ring_bytes: int) -> ActivePlan:
        """Raises TableFullError, ValueError and, if there is no memory for a ring, OSError."""
        plan = SitePlan.of(site)
        self._rings.provide(plan.emission.record_classes, ring_bytes)
        try:
            entry = self._tables.allocate_plan(plan.spec)
        except TableFullError:
            if not self._ended:
                raise
            self.collect(len(self._ended))
            entry = self._tables.allocate_plan(plan.spec)
        active = plan.active(entry)
        self._hit_tables.begin(active)
        self._spans.begin(active)
        return active

    def _switch(self, sites: Iterable[ArmedSite], plans: Mapping[ArmedSite, ActivePlan]) -> list[ActivePlan]:
        """Point the sites' slots to their groups and new plans. Return the plans that were replaced."""
        ended = []
        for site in sites:
            plan = plans.get(site, site.plan if site.consumers else None)
            if plan is None or site.group is None:
                self._tables.slots.clear(site.slot)
            else:
                self._tables.slots.set(site.slot, site.group.number, plan.entry.id)
            if site.plan is not None and site.plan is not plan:
                ended.append(site.plan)
                self._foreign.end(site.plan)
            if plan is not None and site.plan is not plan:
                self._foreign.begin(site.object.key, plan, site.keys_with_foreign_hits)
            site.plan = plan
        return ended


def _forget_consumers(subscription_key: SubscriptionKey | None, sites: Iterable[ArmedSite]) -> None:
    if subscription_key is not None:
        for site in sites:
            site.consumers.pop(subscription_key, None)
