"""The state of what is armed: objects, their sites, and the groups of sites that are attached together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stapsdtd.capture.bpf.constants import ReadOnlyFile
from stapsdtd.capture.bpf.encode import Filter
from stapsdtd.capture.bpf.hit_tables import HitTable
from stapsdtd.capture.bpf.reading import ActivePlan, Channel
from stapsdtd.capture.bpf.slots import GroupNumber, Slot
from stapsdtd.capture.bpf.span_tables import SpanTable
from stapsdtd.capture.engine import Scope as WantedScope
from stapsdtd.capture.engine import SubscriptionKey, TargetSite
from stapsdtd.functions.probes import place_of
from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.places import FunctionPlace, Place
from stapsdtd.model import ObjectKey
from stapsdtd.model import Site as ModelSite
from stapsdtd.plan.attachments import Scope
from stapsdtd.query.actions import Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.query.program import Program

_NOBODY = frozenset[int]()


class Event(Protocol):
    """See `kernel.probe_events.ProbeEvent`, `kernel.uprobe_links.UprobeLink` and `kernel.function_links.FunctionLink`.

    holds_event_mutex: while it is removed, nobody else on the host can arm a uprobe. own_program: that it runs, unless
    this is the one of all events.
    """

    @property
    def holds_event_mutex(self) -> bool: ...

    @property
    def own_program(self) -> OwnProgram | None: ...

    def arm(self, pid: int | None) -> None: ...

    def renew_in(self, pid: int) -> bool: ...

    def missed(self, of_events: Callable[[], Mapping[str, int]]) -> int: ...

    def unpatch(self) -> None: ...

    def unpatch_in(self, pid: int) -> None: ...

    def disarm(self) -> None: ...

    def remove(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Consumer:
    """What one subscription wants of a site. table: where its hits are added up, if that is what it wants. span: where
    starts wait, if it wants pairs. start_filter: which of its starts make pairs that it wants; pair_filter: which of
    the pairs it wants; None for all.
    """

    channel: Channel
    target: TargetSite
    filter: Filter
    table: HitTable | None = None
    span: SpanTable | None = None
    start_filter: Filter | None = None
    pair_filter: Program | None = None

    @property
    def outcome(self) -> Emit | Aggregate | None:
        """What becomes of its hits, or of the pairs that they make; None if they are starts."""
        match self.target.action:
            case BeginSpan():
                return None
            case EndSpan(action=outcome):
                return outcome
            case outcome:
                return outcome

    @property
    def is_end(self) -> bool:
        return isinstance(self.target.action, EndSpan)

    @property
    def may_reject_pairs(self) -> bool:
        """Whether its hits are ends of pairs that it may not want."""
        return isinstance(self.target.action, EndSpan) and self.target.action.is_filtered

    @property
    def is_added(self) -> bool:
        """Whether its hits are added up rather than recorded."""
        return isinstance(self.outcome, Aggregate)

    @property
    def patched(self) -> Scope:
        return patched_in(self.target.scope)


def patched_in(scope: WantedScope) -> Scope:
    """Return the processes that have to be patched. For those that are followed, these are all.

    Events that children inherit (attr.inherit) would not do: the kernel swaps the events of two such tasks when it
    switches between them, but not whom they are for (perf_event_context_sched_out in kernel/events/core.c), and so
    unpatches one when the other ends.
    """
    pids = frozenset(each for each in scope or () if isinstance(each, int))
    return pids if scope is not None and len(pids) == len(scope) else None


@dataclass(slots=True, eq=False)
class ArmedObject:
    """A file with armed sites. The descriptor stays open until it has none and all hits are delivered.

    is_kernel: see `Object`. The kernel has no descriptor.
    """

    key: ObjectKey
    path: str
    architecture: str
    descriptor: int | None
    owner: str
    constants: ReadOnlyFile | None
    is_kernel: bool = False
    sites: dict[ModelSite, ArmedSite] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ArmedSite:
    """A site with its consumers. group, plan: None until it is attached."""

    object: ArmedObject
    site: ModelSite
    slot: Slot
    consumers: dict[SubscriptionKey, Consumer] = field(default_factory=dict)
    group: Group | None = None
    plan: ActivePlan | None = None

    @property
    def unit(self) -> tuple[ArmedObject, str]:
        """A link is to places of one file, or to entries of kernel functions."""
        return self.object, self.site.name if self.object.is_kernel else ""

    @property
    def site_offset(self) -> int:
        return self.site.site_offset

    @property
    def has_offset(self) -> bool:
        return not self.object.is_kernel

    @property
    def is_wanted(self) -> bool:
        return bool(self.consumers)

    @property
    def scope(self) -> Scope:
        """The processes that have to be patched. The kernel is one for all of them."""
        if self.object.is_kernel:
            return None
        pids = _NOBODY
        for consumer in self.consumers.values():
            patched = consumer.patched
            if patched is None:
                return None
            pids |= patched
        return pids

    @property
    def keys_with_foreign_hits(self) -> list[SubscriptionKey]:
        """Return the subscriptions that cause processes to be patched which they may not trace.

        Empty if another subscription wants the site in all processes anyway.
        """
        consumers = self.consumers.values()
        if any(consumer.filter.owners is None and consumer.patched is None for consumer in consumers):
            return []
        is_for_all = self.scope is None
        return [
            key
            for key, consumer in self.consumers.items()
            if consumer.filter.owners is not None and (consumer.patched is None or not is_for_all)
        ]

    @property
    def place(self) -> Place | FunctionPlace:
        if self.object.is_kernel:
            return place_of(self.object.path, self.site)
        return Place(f"/proc/self/fd/{self.object.descriptor}", self.site.site_offset, self.site.semaphore_offset)


@dataclass(slots=True, eq=False)
class Group:
    """Sites behind one tracefs event or link. number: by which the program knows it. free: what it has in tables, once
    it is gone.

    way: to attach to kernel functions. missed: how many calls it did not hit, of which its subscriptions were told.
    is_stale: it is to be replaced, since it patches some process of its scope no more. unpatched: processes of its
    scope whose turn has not come, see `Groups.patch`.
    """

    event: Event
    number: GroupNumber
    free: Callable[[], None]
    scope: Scope
    sites: list[ArmedSite]
    way: str = ""
    missed: int = 0
    is_stale: bool = False
    unpatched: list[int] = field(default_factory=list)

    @property
    def is_of_kernel(self) -> bool:
        return self.sites[0].object.is_kernel
