"""Attaches and detaches groups of sites as `plan.attachments` decides, and undoes what the kernel refuses.

Patching a process takes the kernel a look at each process that maps the file. So it is done in turns where the caller
can come back: a group has its sites at once, and patches the processes of its scope by and by.

    regroup() ──► new group: sites, first processes ──► patch(), patch(), ... ──► old group is detached
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.armed import ArmedSite, Consumer, Event, Group
from stapsdtd.capture.bpf.function_links import FunctionLinks
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.moves import Moves, Wait
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.capture.bpf.slots import GroupNumber
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.names import Owner
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.functions.attaching import FENTRY, KPROBE, MULTI
from stapsdtd.kernel.function_events import FunctionEvent
from stapsdtd.kernel.function_links import tells_missed_entries
from stapsdtd.kernel.places import FunctionPlace, Place
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.kernel.uprobe_links import NoMainThreadError, UprobeLink
from stapsdtd.plan.attachments import EVENTS_ALONE, Attach, Choice, Means, Scope, changes
from stapsdtd.plan.groups import Window, partition_by_page_offset
from stapsdtd.runtime.slices import Turn

_log = logging.getLogger(__name__)

_IN_FILES = ""
"""The way of sites that are none of the kernel's."""

MakeEvent = Callable[[str, Sequence[Place | FunctionPlace], int], Event]
"""Makes a tracefs event of its name, places and cookie. Raises TracefsRejectedError."""

MakeLink = Callable[[Sequence[Place], Sequence[int]], Event]
"""Makes a link of places, and a cookie for each."""


class Attachments(NamedTuple):
    """The ways to attach sites. make_link: None where the kernel has no links to uprobes. functions: None where kernel
    functions take events. choice: of events and links. wait: until hits of files' sites have run all of their programs.
    """

    make_event: MakeEvent
    make_link: MakeLink | None
    wait: Wait
    functions: FunctionLinks | None = None
    choice: Choice = EVENTS_ALONE

    @classmethod
    def of(
        cls, loaded: Loaded, tracefs: Tracefs, ways: Callable[[], Collection[str]], choice: Choice | None = None
    ) -> Self:
        """ways: to attach to kernel functions that this host has. choice: in place of the host's."""
        linked = loaded.linked_program
        make_link = partial(UprobeLink, linked) if linked else None
        tells_skipped = tells_missed_entries(os.uname().release)
        functions = FunctionLinks(loaded, ways, partial(FunctionEvent, tracefs) if tells_skipped else None)
        make_event = partial(ProbeEvent, tracefs, loaded.program)
        return cls(make_event, make_link, loaded.wait_for_uprobes, functions, choice or loaded.choice)


class _Superseded(NamedTuple):
    owner: str
    is_awaited: bool


class Groups:
    """Called from one thread."""

    def __init__(self, owner: Owner, tables: Tables, reaper: EventReaper, attachments: Attachments) -> None:
        self._owner = owner
        self._tables = tables
        self._reaper = reaper
        self._make_event, self._make_link, self._wait, self._functions, self._choice = attachments
        self._event_ids = itertools.count()
        self._numbers = itertools.count(1)
        self._moves = Moves(tables.slots)
        self._superseded: dict[Group, _Superseded] = {}

    def are_links(self, scope: Scope) -> bool:
        """Return whether sites of files that are wanted in a scope have links, which are closed many at a time."""
        return self._make_link is not None and self._choice.means(scope) is not Means.EVENT

    def regroup(
        self,
        sites: Sequence[ArmedSite],
        plans: Mapping[ArmedSite, ActivePlan],
        refused: dict[ArmedSite, str],
        turn: Turn | None = None,
    ) -> list[Group]:
        """Give each site a group that patches the wanted processes. Return the groups that are not needed any more,
        which stay attached until detach() is called.

        plans: of the sites that are wanted. refused: receives the sites that the kernel refused, and the reasons; those
        stay in their groups. turn: once it is over, processes are left for patch().
        """
        groups = list(dict.fromkeys(site.group for site in sites if site.group is not None))
        ungrouped = [site for site in sites if site.group is None]
        needed = changes(groups, ungrouped, choice=self._choice)
        if fixed := [group for group, pids in needed.widen if not self._widen(group, pids, turn)]:
            needed = changes(groups, ungrouped, fixed, choice=self._choice)
        try:
            for attach in needed.attach:
                for way, members in self._parts(attach.sites):
                    self._attach(way, replace(attach, sites=tuple(members)), plans, refused, turn)
        finally:
            if self._functions is not None:
                self._functions.forget_unused()
        kept = {site.group for site in refused if site.group is not None}
        for group in kept:
            for newer in {site.group for site in group.sites if site.group not in {None, group}}:
                with contextlib.suppress(OSError):
                    self._patch_some(newer, None)
            self._begin_move(group)
            self._moves.end(group.number)
            group.sites = [site for site in group.sites if site.group is group]
        superseded = [group for group in needed.detach if group not in kept]
        for group in superseded:
            # a hit runs the programs of what was attached last first, and the newest group has to be that
            group.unpatched.clear()
        return superseded

    def patch(self, group: Group, turn: Turn) -> None:
        """Patch further processes of a group's scope until the turn is over.

        Raises OSError, also NoMainThreadError, if one cannot be patched: it is tried again the next time.
        """
        self._patch_some(group, turn)
        self._detach_superseded()

    def _patch_some(self, group: Group, turn: Turn | None) -> None:
        while group.unpatched:
            self._patch(group, group.unpatched[-1])
            group.unpatched.pop()
            if turn is not None and turn.is_over:
                break

    def detach(self, group: Group, owner: str, *, is_awaited: bool) -> None:
        """Begin to remove a group whose sites now have another one, or none, once those patch all that they are to.
        owner: see `turns`.
        """
        for site in group.sites:
            if site.group is group:
                site.group = None
        self._superseded[group] = _Superseded(owner, is_awaited)
        self._detach_superseded()

    def _detach_superseded(self) -> None:
        for group in list(self._superseded):
            if not any(site.group is not None and site.group.unpatched for site in group.sites):
                self._detach(group, *self._superseded.pop(group))

    def _detach(self, group: Group, owner: str, is_awaited: bool) -> None:
        # where it keeps nobody waiting, it need not wait for anybody
        is_awaited = is_awaited or not group.event.holds_event_mutex
        if not is_awaited:
            owner = group.sites[0].object.owner or owner
        self._begin_move(group)
        end_move = partial(self._moves.end, group.number)
        self._reaper.begin(group.event, group.free, owner=owner, is_awaited=is_awaited, before=end_move)

    def _begin_move(self, group: Group) -> None:
        """Note which sites of a group have another one now. Of each, hits count in either until the move has ended."""
        moved = [site.slot for site in group.sites if site.group not in {None, group}]
        if moved:
            functions = self._functions if group.is_of_kernel else None
            self._moves.begin(group.number, moved, functions.wait_for_hits if functions else self._wait)

    def _widen(self, group: Group, pids: Iterable[int], turn: Turn | None) -> bool:
        """Patch further processes, too: all or none. Report whether that worked."""
        if turn is not None:
            group.unpatched.extend(pids)
            group.scope = (group.scope or frozenset()) | frozenset(pids)
            return True
        try:
            with contextlib.ExitStack() as undo:
                for pid in sorted(pids):
                    self._patch(group, pid)
                    undo.callback(group.event.unpatch_in, pid)
                undo.pop_all()
        except OSError as error:
            _log.info("%s: cannot patch further processes: %s", group.sites[0].object.path, error)
            return False
        group.scope = (group.scope or frozenset()) | frozenset(pids)
        return True

    def _parts(self, sites: Sequence[ArmedSite]) -> list[tuple[str, Sequence[ArmedSite]]]:
        """Partition sites that could share a group by the way that each kernel function takes."""
        if not sites[0].object.is_kernel:
            return [(_IN_FILES, sites)]
        if self._functions is None:
            return [(KPROBE, [site]) for site in sites]
        places = [place for site in sites if isinstance(place := site.place, FunctionPlace)]
        attached = {
            each.site.function: each.group.way
            for each in sites[0].object.sites.values()
            if each.group is not None and each.site.function
        }
        parts = self._functions.parts(places, attached)
        return [(part.way, [sites[position] for position in part.positions]) for part in parts]

    def _attach(
        self,
        way: str,
        wanted: Attach[ArmedSite],
        plans: Mapping[ArmedSite, ActivePlan],
        refused: dict[ArmedSite, str],
        turn: Turn | None,
    ) -> None:
        """Attach sites in a new group, or find those that the kernel refuses by halving it."""
        sites = wanted.sites
        try:
            group = self._attached(way, wanted, plans, turn)
        except (TracefsRejectedError, OSError, TableFullError) as error:
            if len(sites) > 1:
                middle = len(sites) // 2
                for half in (sites[:middle], sites[middle:]):
                    self._attach(way, replace(wanted, sites=half), plans, refused, turn)
                return
            _log.info("%s: %s: %s", sites[0].object.path, sites[0].site.function or sites[0].site.name, error)
            if way in {FENTRY, MULTI} and not _has_calls_by_fentry(sites[0]):
                self._attach(KPROBE, wanted, plans, refused, turn)
            else:
                refused[sites[0]] = str(error)
        else:
            for site in sites:
                site.group = group

    def _attached(
        self,
        way: str,
        wanted: Attach[ArmedSite],
        plans: Mapping[ArmedSite, ActivePlan],
        turn: Turn | None,
    ) -> Group:
        sites, scope = wanted.sites, wanted.scope
        self._reaper.collect()
        number = next(self._numbers) & (1 << layout.GROUP_BITS) - 1
        slots = self._tables.slots
        with self._reaper.arming(sites[0].object.owner), contextlib.ExitStack() as undo:
            event, free = self._made_event(way, sites, scope, number)
            undo.callback(free)
            undo.callback(slots.dismiss, [site.slot for site in sites], number)
            undo.callback(event.remove)
            group = Group(event, number, free, scope, list(sites), way)
            for site in sites:
                # before patching, so that the first hit finds its plan
                if site.group is None:
                    slots.set(site.slot, number, plans[site].entry.id)
                elif site.group.way == way:
                    slots.admit(site.slot, number)
            self._patch_scope(group, turn)
            undo.pop_all()
        return group

    def _patch_scope(self, group: Group, turn: Turn | None) -> None:
        """Patch the processes of a new group's scope, or all where no fewer can be had. See `regroup` for turn."""
        if group.scope is None or self._means(group.sites, group.scope) is Means.SHARED_LINK:
            self._patch(group, None)
            return
        group.unpatched = sorted(group.scope, reverse=True)
        try:
            self._patch_some(group, turn)
        except NoMainThreadError as error:
            _log.info("%s: %s; all processes are patched", group.sites[0].object.path, error)
            # before the link for all, which runs the program for the same hits
            group.event.unpatch()
            group.unpatched.clear()
            self._patch(group, None)

    def _next_name(self) -> str:
        return f"{self._owner.group}/g{next(self._event_ids)}_{self._owner.group.removeprefix('stapsdtd_')}"

    def _means(self, sites: Sequence[ArmedSite], scope: Scope) -> Means:
        """Return what sites are attached by, unless they are the kernel's and have a link of their own kind."""
        return Means.EVENT if sites[0].object.is_kernel else self._choice.means(scope)

    def _made_event(
        self, way: str, sites: Sequence[ArmedSite], scope: Scope, number: GroupNumber
    ) -> tuple[Event, Callable[[], None]]:
        """Return what is to be armed, and what frees its room in tables once it is gone.

        The program finds a hit's slot in a link's cookie, and an event's in the index; see bpf/stapsdt.bpf.c.
        """
        places = [site.place for site in sites]
        cookies = [number << layout.GROUP_SHIFT | site.slot for site in sites]
        if self._functions is not None and way in {FENTRY, MULTI}:
            of_kernel = [place for place in places if isinstance(place, FunctionPlace)]
            return self._functions.link(way, of_kernel, cookies), _free_nothing
        if self._make_link is not None and self._means(sites, scope) is not Means.EVENT:
            return self._make_link([place for place in places if isinstance(place, Place)], cookies), _free_nothing
        window = _window(sites)
        first = self._tables.allocate_index(window)
        free = partial(self._tables.free_index, first, window)
        with contextlib.ExitStack() as undo:
            undo.callback(free)
            self._tables.fill_index(first, window, {site.site_offset: site.slot for site in sites})
            cookie = number << layout.GROUP_SHIFT | window.shift << 32 | (window.entries - 1) << 20 | first
            name = self._next_name()
            of_function = self._functions.event(name, places, cookie) if way == KPROBE and self._functions else None
            event = of_function or self._make_event(name, places, cookie)
            undo.pop_all()
        return event, free

    def _patch(self, group: Group, pid: int | None) -> None:
        try:
            group.event.arm(pid)
        except ProcessLookupError:
            # the process has ended; without one, the kernel cannot find a function (ftrace_lookup_symbols)
            if pid is None:
                raise


def _window(sites: Sequence[ArmedSite]) -> Window:
    """Return the bits of addresses that tell sites of an event apart. A function of the kernel has it alone."""
    if sites[0].object.is_kernel:
        return Window(0, 0)
    (partition,) = partition_by_page_offset([site.site_offset for site in sites])
    return partition.window


def _free_nothing() -> None:
    """Links have no room in tables."""


def _has_calls_by_fentry(site: ArmedSite) -> bool:
    """Report whether a site's hits belong to those of the function's other end, which has fentry or fexit.

    A kprobe would not find them, in spans of calls and on chains; see take_arguments() in bpf/stapsdt.bpf.c.
    """
    if not any(map(_is_of_calls, site.consumers.values())):
        return False
    others = (each for each in site.object.sites.values() if each.site.function == site.site.function)
    return any(each.group is not None and each.group.way == FENTRY for each in others)


def _is_of_calls(consumer: Consumer) -> bool:
    return consumer.filter.link is not None or (consumer.span is not None and consumer.span.span.is_of_calls)
