"""The engine of BPF programs: one attachment for all subscriptions of a site, one record for each hit.

consumers of all subscriptions ──► scope ──► groups (tracefs events, patched processes)
                           └─► values, filters ──► plan (what the program does at the site)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.constants import ReadOnlyFile, SiteConstants
from stapsdtd.capture.bpf.encode import Filter, NotEncodableError, encode_abs_ip, encode_value
from stapsdtd.capture.bpf.endings import Endings
from stapsdtd.capture.bpf.foreign import ForeignHits
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Fixed, Layout, NoText, NumberAt, Reading, Source, TextAt
from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.capture.bpf.rings import Ring
from stapsdtd.capture.bpf.tables import Slot, Tables
from stapsdtd.capture.bpf.turns import MOST_EPHEMERAL
from stapsdtd.capture.engine import (
    EngineMetrics,
    Refusal,
    RingMetrics,
    Sink,
    SubscriptionKey,
    Target,
    TargetSite,
    UnreadMetrics,
)
from stapsdtd.capture.names import Owner
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Argument, Capture, Constant, Memory, Object, ObjectKey, Unavailable
from stapsdtd.model import Site as ModelSite
from stapsdtd.plan.groups import Window, partition_by_page_offset
from stapsdtd.plan.values import Value, united, value_of
from stapsdtd.query.program import compile_for

_log = logging.getLogger(__name__)

Scope = frozenset[int] | None
"""Processes that are patched; None is all of them."""

_NOBODY = frozenset[int]()

_RECORD_BYTES = layout.STRIDES[-1] - layout.RECORD_HEADER - layout.MAX_TEXT - 1
"""The program begins a string only where the longest one has room."""

_RECORDS_AT_LEAST = 4
_SPARE_BYTES = 64 << 10

_OTHERS_FILTERS = 3 * layout.MAX_FILTERS // 4
_OTHERS_STEPS = 3 * layout.MAX_STEPS // 4
_OTHERS_CAPTURES = layout.MAX_VALUES // 2

_KEPT_RING_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Consumer:
    """What one subscription wants of a site."""

    channel: Channel
    target: TargetSite
    filter: Filter


@dataclass(slots=True, eq=False)
class _Object:
    """A file that is armed; the descriptor reaches it for as long as that lasts, and until all hits are delivered."""

    key: ObjectKey
    path: str
    architecture: str
    descriptor: int
    owner: str
    constants: ReadOnlyFile
    sites: dict[ModelSite, _Site] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Site:
    object: _Object
    site: ModelSite
    slot: Slot
    consumers: dict[SubscriptionKey, _Consumer] = field(default_factory=dict)
    group: _Group | None = None
    plan: ActivePlan | None = None

    @property
    def scope(self) -> Scope:
        pids = _NOBODY
        for consumer in self.consumers.values():
            if consumer.target.pids is None:
                return None
            pids |= consumer.target.pids
        return pids

    @property
    def tickets_with_foreign_hits(self) -> list[SubscriptionKey]:
        """Those for whose sake processes are patched that they do not see; nobody's where another sees them all."""
        consumers = self.consumers.values()
        if any(consumer.filter.owners is None and consumer.target.pids is None for consumer in consumers):
            return []
        is_for_all = self.scope is None
        return [
            subscription_key
            for subscription_key, consumer in self.consumers.items()
            if consumer.filter.owners is not None and (consumer.target.pids is None or not is_for_all)
        ]

    @property
    def place(self) -> str:
        """As a definition names it."""
        semaphore = self.site.semaphore_offset
        counter = "" if semaphore is None else f"({semaphore:#x})"
        return f"/proc/self/fd/{self.object.descriptor}:{self.site.site_offset:#x}{counter}"


@dataclass(slots=True, eq=False)
class _Group:
    """Sites behind one tracefs event. first: its first entry in the index, which is its number."""

    event: ProbeEvent
    window: Window
    first: int
    scope: Scope
    sites: list[_Site]

    @property
    def cookie(self) -> int:
        """What the program is told of a hit: where in the index to look, by which bits of its address."""
        return self.first | (self.window.entries - 1) << 32 | self.window.shift << 48


@dataclass(slots=True)
class _Subscription:
    channel: Channel
    buffer_bytes: int
    owner: str
    sites: dict[ObjectKey, list[_Site]] = field(default_factory=dict)


class BpfEngine:
    """See `capture.engine.Engine`.

    A site is armed once, for all processes that any subscription wants; the program tells apart what each one wants.
    Where consumers come or go, a new plan takes the place of the old one in the site's slot. Where fewer processes or
    sites are wanted, a new group is armed before the old one goes, and the slot says which of them counts.
    """

    name = "bpf"

    def __init__(
        self, tracefs: Tracefs, owner: Owner, loaded: Loaded, paging: Paging, max_buffer_bytes: int = 1 << 40
    ) -> None:
        """max_buffer_bytes: of all rings together, which are as large as that lets them be."""
        self._max_ring_bytes = 1 << (max_buffer_bytes // len(layout.STRIDES)).bit_length() - 1
        self._tracefs = tracefs
        self._owner = owner
        self._loaded = loaded
        self._tables = Tables(loaded.table, loaded.cpus)
        self._paging = paging
        self._reader = Reader(self._tables, loaded.set_reader_waits, paging.request)
        self._endings = Endings(loaded.wait_for_hits, self._reader.end)
        self._removals = EventReaper()
        self._foreign = ForeignHits(self._tables)
        self._numbers = itertools.count()
        self._subscriptions: dict[SubscriptionKey, _Subscription] = {}
        self._objects: dict[ObjectKey, _Object] = {}
        self._rings: dict[int, Ring] = {}
        self._make_spares()

    def why_not(self, capture: Capture, argument: Argument, architecture: str) -> str | None:
        found = source_of(capture, argument, architecture)
        return found.reason if isinstance(found, Unavailable) else None

    def open(self, subscription_key: SubscriptionKey, sink: Sink, kernel_buffer_kib: int, owner: str = "") -> None:
        buffer_bytes = kernel_buffer_kib * 1024 * len(online_cpus())
        self._subscriptions[subscription_key] = _Subscription(Channel(subscription_key, sink), buffer_bytes, owner)
        # the kernel takes a while to put one in place, which the first library to appear should not wait for
        with contextlib.suppress(OSError):
            self._make_rings([0])

    def arm(self, subscription_key: SubscriptionKey, target: Target) -> list[Refusal]:
        subscription = self._subscriptions[subscription_key]
        reason = self._removals.why_not(target.owner, MOST_EPHEMERAL) if target.is_ephemeral else None
        if reason := reason or self._removals.why_not(subscription.owner):
            return [Refusal(wanted.capture.site, reason) for wanted in target.sites]
        found = self._object(target)
        subscription.channel.excluded |= target.exclude_pids | target.exclude_later
        refusals: dict[ModelSite, str] = {}
        sites = []
        for wanted in target.sites:
            try:
                site = self._site(found, wanted.capture.site)
                site.consumers[subscription_key] = _Consumer(subscription.channel, wanted, _filter(target, wanted))
            except (TableFullError, ValueError) as error:
                refusals[wanted.capture.site] = str(error)
            else:
                sites.append(site)
        try:
            refused = self._bring_in_step(sites, subscription.owner, subscription_key)
        except BaseException:
            # what fails for this one is not to be tried again with whatever others want of its sites
            self._release(subscription_key, sites, is_awaited=False)
            raise
        subscription.sites[found.key] = [site for site in sites if subscription_key in site.consumers]
        self._forget_unwanted(found)
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
            self._drop_large_rings()
        return self._endings.begin([], [subscription.channel])

    def _release(self, subscription_key: SubscriptionKey, sites: Sequence[_Site], *, is_awaited: bool) -> None:
        for site in sites:
            # it may be gone already, where an earlier try ran out of memory
            site.consumers.pop(subscription_key, None)
        owner = self._subscriptions[subscription_key].owner
        for site, reason in self._bring_in_step(sites, owner, is_awaited=is_awaited).items():
            _log.warning("%s: %s stays armed as it was: %s", site.object.path, site.site.name, reason)
        for found in {site.object for site in sites}:
            self._forget_unwanted(found)

    def ask(self) -> Future[None]:
        return self._reader.ask()

    def problem(self) -> str | None:
        return self._reader.problem() or self._tracefs.problem()

    def metrics(self) -> EngineMetrics:
        sites = [site for found in list(self._objects.values()) for site in list(found.sites.values())]
        groups = [site.group for site in sites if site.group is not None]
        rings = [
            RingMetrics(str(ring.stride), min(max(ring.filled, 0), ring.size), ring.size)
            for _, ring in sorted(self._rings.copy().items())
        ]
        strays = int(self._tables.totals()[layout.STRAY_HITS]) + self._reader.unknown
        paging = self._paging.metrics()
        unread = UnreadMetrics(
            self._reader.from_file, self._reader.unavailable, paging.touched, paging.refused, paging.stuck
        )
        return EngineMetrics(len(groups), len({id(group) for group in groups}), tuple(rings), strays, unread)

    def quiesced(self, owner: str = "") -> Future[None]:
        return self._removals.quiesced(owner)

    def foreign_hits(self) -> dict[tuple[SubscriptionKey, ObjectKey], int]:
        return self._foreign.take()

    def retry_cleanup(self) -> None:
        self._removals.try_again()

    def shutdown(self) -> None:
        with contextlib.ExitStack() as steps:
            steps.callback(self._loaded.close)
            steps.callback(self._reader.stop)
            steps.callback(self._removals.finish)
            steps.callback(self._endings.finish)
            for subscription_key in list(self._subscriptions):
                steps.callback(self.close, subscription_key)

    def _object(self, target: Target) -> _Object:
        key = target.object.key
        found = self._objects.get(key)
        if found is None:
            descriptor = os.open(target.file_path, os.O_RDONLY | os.O_CLOEXEC)
            parsed = target.object.parsed
            constants = ReadOnlyFile(descriptor, parsed.read_only)
            found = _Object(key, target.object.path, parsed.architecture, descriptor, target.owner, constants)
            self._objects[key] = found
            with contextlib.suppress(OSError):
                constants.read_ahead()
        return found

    def _site(self, found: _Object, site: ModelSite) -> _Site:
        """Raises TableFullError."""
        known = found.sites.get(site)
        if known is None:
            known = found.sites[site] = _Site(found, site, self._tables.allocate_slot())
        return known

    def _forget_unwanted(self, found: _Object) -> None:
        for site in [site for site in found.sites.values() if not site.consumers and site.group is None]:
            self._tables.free_slot(site.slot)
            del found.sites[site.site]
        if not found.sites and self._objects.pop(found.key, None) is not None:
            # hits of plans that ended before may have constants to be read from it
            self._endings.begin([]).add_done_callback(lambda _: os.close(found.descriptor))

    def _bring_in_step(
        self, sites: Sequence[_Site], owner: str, newcomer: SubscriptionKey | None = None, *, is_awaited: bool = False
    ) -> dict[_Site, str]:
        """Arm, plan and disarm as the consumers of some sites say now; answer which could not be served, and why.

        Those keep the group and plan that they have, and the newcomer is forgotten. There may be others among
        them, which had to move. owner: who consumers it so.
        """
        refused: dict[_Site, str] = {}
        for over in self._endings.collect():
            self._tables.free_plan(over.entry)
        plans = self._new_plans(sites, refused)
        _forget_consumers(newcomer, refused)
        if plans:
            self._reader.begin(plans.values())
        superseded = self._regroup(sites, plans, refused)
        _forget_consumers(newcomer, refused)
        ended = [plan for site, plan in plans.items() if site in refused]
        ended += self._switch(
            dict.fromkeys([*sites, *(site for group in superseded for site in group.sites)]),
            {site: plan for site, plan in plans.items() if site not in refused},
        )
        for group in superseded:
            self._remove(group, owner, is_awaited=is_awaited)
        if ended:
            self._endings.begin(ended)
        return refused

    def _new_plans(self, sites: Iterable[_Site], refused: dict[_Site, str]) -> dict[_Site, ActivePlan]:
        """Before anything is armed or moved, so that a refusal changes nothing and every hit finds its plan."""
        plans = {}
        for site in sites:
            if site.consumers:
                try:
                    plans[site] = self._plan(site)
                except (TableFullError, OSError, ValueError) as error:
                    refused[site] = str(error)
        return plans

    def _switch(self, sites: Iterable[_Site], plans: Mapping[_Site, ActivePlan]) -> list[ActivePlan]:
        """Have sites' hits go by their groups, and by new plans where there are some; answer the plans that ended."""
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
                self._foreign.begin(site.object.key, plan, site.tickets_with_foreign_hits)
            site.plan = plan
        return ended

    def _regroup(
        self, sites: Sequence[_Site], plans: Mapping[_Site, ActivePlan], refused: dict[_Site, str]
    ) -> list[_Group]:
        """Give each site a group that patches what is wanted; answer the groups that serve no more."""
        superseded = []
        homeless = {site for site in sites if site.group is None and site.consumers}
        for group in dict.fromkeys(site.group for site in sites if site.group is not None):
            wanted = [site for site in group.sites if site.consumers]
            scopes = {site.scope for site in wanted}
            is_whole = len(wanted) == len(group.sites) and len(scopes) == 1
            if not is_whole or not self._reaches(group, scopes.pop()):
                superseded.append(group)
                homeless.update(wanted)
        by_scope = defaultdict(list)
        for site in sorted(homeless, key=lambda site: site.site.site_offset):
            by_scope[site.scope].append(site)
        for scope, members in by_scope.items():
            for partition in partition_by_page_offset([site.site.site_offset for site in members]):
                self._make_group([members[position] for position in partition.members], scope, plans, refused)
        kept = {site.group for site in refused if site.group is not None}
        for group in kept:
            group.sites = [site for site in group.sites if site.group is group]
        return [group for group in superseded if group not in kept]

    def _reaches(self, group: _Group, scope: Scope) -> bool:
        """Patch further processes as well, where that is all that is to be done."""
        if group.scope == scope:
            return True
        if group.scope is None or scope is None or not group.scope < scope:
            return False
        try:
            for pid in sorted(scope - group.scope):
                self._patch(group, pid)
        except OSError as error:
            _log.info("%s: %s", group.sites[0].object.path, error)
            return False
        group.scope = scope
        return True

    def _make_group(
        self, sites: list[_Site], scope: Scope, plans: Mapping[_Site, ActivePlan], refused: dict[_Site, str]
    ) -> None:
        """Arm sites in a group of their own; one that the kernel refuses is found by halving."""
        try:
            group = self._armed_group(sites, scope, plans)
        except (TracefsRejectedError, OSError, TableFullError) as error:
            if len(sites) == 1:
                _log.info("%s: %s", sites[0].object.path, error)
                refused[sites[0]] = str(error)
                return
            middle = len(sites) // 2
            self._make_group(sites[:middle], scope, plans, refused)
            self._make_group(sites[middle:], scope, plans, refused)
        else:
            for site in sites:
                site.group = group

    def _armed_group(self, sites: list[_Site], scope: Scope, plans: Mapping[_Site, ActivePlan]) -> _Group:
        (partition,) = partition_by_page_offset([site.site.site_offset for site in sites])
        window = partition.window
        self._removals.collect()
        first = self._tables.allocate_group(window)
        with self._removals.arming(sites[0].object.owner), contextlib.ExitStack() as taken_back:
            taken_back.callback(self._tables.free_group, first, window)
            self._tables.fill_group(first, window, {site.site.site_offset: site.slot for site in sites})
            name = f"g{next(self._numbers)}_{self._owner.group.removeprefix('stapsdtd_')}"
            event = ProbeEvent(self._tracefs, self._owner.group, name, [site.place for site in sites])
            taken_back.callback(event.remove)
            group = _Group(event, window, first, scope, sites)
            for site in sites:
                if site.group is None:
                    # the first hit finds it
                    self._tables.set_slot(site.slot, first, plans[site].entry.id)
            for pid in [None] if scope is None else sorted(scope):
                self._patch(group, pid)
            taken_back.pop_all()
        return group

    def _patch(self, group: _Group, pid: int | None) -> None:
        # a process that is gone needs nothing
        with contextlib.suppress(ProcessLookupError):
            group.event.arm(pid, self._loaded.program, group.cookie)

    def _remove(self, group: _Group, owner: str, *, is_awaited: bool) -> None:
        """Its sites have other groups by now, or none."""
        if not is_awaited:
            owner = group.sites[0].object.owner or owner
        for site in group.sites:
            if site.group is group:
                site.group = None
        self._removals.begin(
            group.event,
            lambda: self._tables.free_group(group.first, group.window),
            owner=owner,
            is_awaited=is_awaited,
        )

    def _plan(self, site: _Site) -> ActivePlan:
        """Raises TableFullError, ValueError and, where the kernel has no memory for a ring, OSError."""
        fetcher = _Fetcher(site)
        values = united(fetcher.values())
        _check_shares(site)
        constants = SiteConstants.around(site.object.constants, site.site.site_offset)
        if not any(map(fetcher.reads_memory, values)):
            constants = None
        operands = [fetcher.encode(value) for value in values]
        if constants is not None:
            operands.append(encode_abs_ip(site.object.architecture))
        if len(operands) > layout.MAX_VALUES:
            raise ValueError(f"{len(operands)} values are wanted of it, and {layout.MAX_VALUES} are possible")
        least = layout.RECORD.itemsize + 8 * len(operands)
        most = least + sum(value.limit for value in values)
        if most > _RECORD_BYTES:
            raise ValueError(f"{most} bytes are wanted of it at most, and {_RECORD_BYTES} are possible")
        tested = {Value(index) for consumer in site.consumers.values() for index in consumer.filter.arguments}
        further = sorted(tested.difference(values))
        own = {value.number: place for place, value in enumerate(values) if not value.is_string}
        places = own | {value.number: place for place, value in enumerate(further, len(operands))}
        bits = {
            wanted: bit
            for bit, wanted in enumerate(dict.fromkeys(consumer.filter for consumer in site.consumers.values()))
        }
        if len(bits) > layout.MAX_FILTERS or sum(wanted.steps for wanted in bits) > layout.MAX_STEPS:
            raise ValueError(f"{len(bits)} different filters are wanted of it, more than are possible")
        self._make_rings(range(layout.record_class(least), layout.record_class(most) + 1))
        entry = self._tables.allocate_plan(
            operands,
            [fetcher.encode(value) for value in further],
            {bit: wanted for wanted, bit in bits.items()},
            places,
            has_texts=most > least,
        )
        positions = {value[:2]: position for position, value in enumerate(values)}
        readings = tuple(
            Reading(
                consumer.channel, bits[consumer.filter], consumer.target.site_id, fetcher.layout(consumer, positions)
            )
            for consumer in site.consumers.values()
        )
        tested_bits = sum(1 << bit for wanted, bit in bits.items() if not wanted.accepts_all)
        return ActivePlan(entry, readings, tested_bits, constants, abs_ip_at=len(values))

    def _make_rings(self, classes: Iterable[int]) -> None:
        """All subscriptions share the rings, which are as large as the largest that any of them asked for."""
        buffer_bytes = max(subscription.buffer_bytes for subscription in self._subscriptions.values())
        for number in classes:
            stride = layout.STRIDES[number]
            wanted = min(buffer_bytes, self._max_ring_bytes)
            size = 1 << (max(wanted, _RECORDS_AT_LEAST * stride, mmap.PAGESIZE) - 1).bit_length()
            held = self._rings.get(number)
            if held is None or held.size < size:
                self._rings[number] = self._new_ring(stride, size, partial(self._loaded.put_ring, number))
                if held is not None:
                    self._reader.retire_ring(held)

    def _new_ring(self, stride: int, size: int, put: Callable[[int], None]) -> Ring:
        """put: gives the program its descriptor. Raises OSError."""
        ring = Ring(stride, size)
        # hits write to it before put() returns, and plans end meanwhile whose records are to be read first
        self._reader.add_ring(ring)
        try:
            put(ring.fileno())
        except OSError:
            self._reader.retire_ring(ring)
            raise
        return ring

    def _make_spares(self) -> None:
        """Once for all: the kernel takes a while to put one in place."""
        for number, stride in enumerate(layout.STRIDES):
            try:
                self._new_ring(
                    stride, max(_SPARE_BYTES, _RECORDS_AT_LEAST * stride), partial(self._loaded.put_spare, number)
                )
            except OSError as error:
                _log.warning("a process that floods the daemon may cost others events: no spare ring: %s", error)
                return

    def _drop_large_rings(self) -> None:
        """Nobody is subscribed. The others are kept for the next one, since to put a ring in place takes a while."""
        for number, ring in list(self._rings.items()):
            if ring.size > _KEPT_RING_BYTES:
                self._loaded.take_ring(number)
                self._reader.retire_ring(ring)
                del self._rings[number]


def source_of(capture: Capture, argument: Argument, architecture: str) -> Value | Constant | Unavailable:
    """What a record holds for a capture, if it has to."""
    found = value_of(capture, argument, architecture)
    if isinstance(found, Value):
        try:
            encode_value(found, argument, architecture)
        except NotEncodableError as error:
            return Unavailable(str(error))
    return found


class _Fetcher:
    """What a site's record has to hold for each of its consumers, and how each one reads it."""

    def __init__(self, site: _Site) -> None:
        self._arguments = site.site.arguments
        self._architecture = site.object.architecture
        self._sources = {
            consumer.channel.subscription_key: [
                source_of(capture, self._arguments[capture.index], self._architecture)
                for capture in consumer.target.capture.captures
            ]
            for consumer in site.consumers.values()
        }

    def values(self) -> Iterator[Value]:
        for sources in self._sources.values():
            for source in sources:
                if isinstance(source, Value):
                    yield source

    def encode(self, value: Value) -> bytes:
        """Raises NotEncodableError."""
        return encode_value(value, self._arguments[value.number], self._architecture)

    def reads_memory(self, value: Value) -> bool:
        return value.is_text or isinstance(self._arguments[value.number].operand, Memory)

    def layout(self, consumer: _Consumer, positions: Mapping[tuple[int, bool], int]) -> Layout:
        """positions: of the record's values, by number and is_string."""
        sources: list[Source] = []
        for capture, found in zip(
            consumer.target.capture.captures, self._sources[consumer.channel.subscription_key], strict=True
        ):
            argument = self._arguments[capture.index]
            is_signed = argument.signed
            match found:
                case Value(is_text=True):
                    sources.append(TextAt(positions[found[:2]], found.limit, is_raw=not found.is_string))
                case Value():
                    float_bytes = argument.size if argument.is_float else 0
                    sources.append(NumberAt(positions[found[:2]], is_signed, float_bytes))
                case Constant(value=number):
                    sources.append(Fixed(number, is_signed))
                case Unavailable() if capture.is_string:
                    sources.append(NoText())
                case Unavailable():
                    sources.append(Fixed(None, is_signed, argument.is_float))
        return tuple(sources)


def _check_shares(site: _Site) -> None:
    """Keep a part of what a site can do for those who may trace everybody's processes.

    Raises ValueError where others want more than the rest of it.
    """
    others = [consumer for consumer in site.consumers.values() if consumer.filter.owners is not None]
    filters = {consumer.filter for consumer in others}
    captures = {capture for consumer in others for capture in consumer.target.capture.captures}
    steps = sum(wanted.steps for wanted in filters)
    if len(filters) > _OTHERS_FILTERS or steps > _OTHERS_STEPS or len(captures) > _OTHERS_CAPTURES:
        raise ValueError("more is wanted of it than those may have who may not trace everybody's processes")


def _forget_consumers(subscription_key: SubscriptionKey | None, sites: Iterable[_Site]) -> None:
    if subscription_key is not None:
        for site in sites:
            site.consumers.pop(subscription_key, None)


def _filter(target: Target, wanted: TargetSite) -> Filter:
    """Raises ValueError where the predicate does not fit the site."""
    program = None if target.predicate is None else compile_for(target.predicate, wanted.capture.site)
    return Filter(wanted.pids, frozenset(target.exclude_pids), program, target.owners)
