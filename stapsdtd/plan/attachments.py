"""Plans changes of groups: (wanted sites and scopes, groups) -> widen, attach, detach.

    wanted                    installed               changes
    0x10 everybody            group 0: 0x10, 0x20     detach group 0
    0x20 nobody          +    scope: everybody    ─►  attach 0x10, scope: everybody
    0x30 process 7            group 1: 0x30           widen group 1 by process 8
         and 8                scope: process 7

A group patches all of its sites for one scope. So if a site is not wanted any more, or its scope shrinks, the other
sites get a new group. It is attached before the old one is detached, so that no hit is missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from stapsdtd.plan.groups import partition_by_page_offset

Scope = frozenset[int] | None
"""Pids of the processes that are patched; None for all."""


class Means(Enum):
    """What sites of a file are attached by."""

    EVENT = "perf events"
    LINK = "links"
    SHARED_LINK = "links for all processes"
    """Which patch more processes than the scope has; the program tells whose hits count."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What this host attaches sites of files by, decided once when the daemon starts.

    for_all: for all processes. by_pid: for single ones.
    """

    for_all: Means
    by_pid: Means

    def means(self, scope: Scope) -> Means:
        return self.for_all if scope is None else self.by_pid


EVENTS_ALONE = Choice(Means.EVENT, Means.EVENT)
"""On kernels without links to uprobes."""


class Site(Protocol):
    """A site that may be wanted. unit: sites of different ones are not attached together. has_offset: whether its
    offset tells it apart, rather than who attaches it. scope: for which processes it is wanted.
    """

    @property
    def unit(self) -> Hashable: ...

    @property
    def site_offset(self) -> int: ...

    @property
    def has_offset(self) -> bool: ...

    @property
    def is_wanted(self) -> bool: ...

    @property
    def scope(self) -> Scope: ...


S = TypeVar("S", bound=Site)


class Group(Protocol[S]):
    """Sites that are attached together. is_stale: it patches some process of its scope no more."""

    sites: list[S]
    scope: Scope
    is_stale: bool


G = TypeVar("G", bound=Group)  # type: ignore[type-arg]


@dataclass(frozen=True, slots=True)
class Attach(Generic[S]):
    """Patch sites in a new group."""

    sites: tuple[S, ...]
    scope: Scope


@dataclass(slots=True)
class Changes(Generic[S, G]):
    """widen: groups, and the pids that they are to patch in addition."""

    widen: list[tuple[G, frozenset[int]]] = field(default_factory=list)
    attach: list[Attach[S]] = field(default_factory=list)
    detach: list[G] = field(default_factory=list)


def changes(
    groups: Iterable[G], ungrouped: Iterable[S], fixed: Collection[G] = (), *, choice: Choice = EVENTS_ALONE
) -> Changes[S, G]:
    """Return the changes after which every wanted site is patched in its scope, and nowhere else.

    groups: of sites whose consumers changed. ungrouped: sites without a group. fixed: groups that cannot be widened.
    choice: links need no page offsets to tell sites apart.
    """
    result: Changes[S, G] = Changes()
    unattached = [site for site in ungrouped if site.is_wanted]
    for group in groups:
        wanted = [site for site in group.sites if site.is_wanted]
        missing = _missing_pids(group, wanted)
        if missing is None or (missing and group in fixed):
            result.detach.append(group)
            unattached += wanted
        elif missing:
            result.widen.append((group, missing))
    together: defaultdict[tuple[Hashable, Scope], list[S]] = defaultdict(list)
    for site in sorted(unattached, key=lambda site: site.site_offset):
        together[site.unit, site.scope].append(site)
    for (_, scope), sites in together.items():
        needs_offsets = sites[0].has_offset and choice.means(scope) is Means.EVENT
        shared = share_groups(sites) if needs_offsets else [sites]
        result.attach += [Attach(tuple(members), scope) for members in shared]
    return result


def share_groups(sites: Sequence[S]) -> list[list[S]]:
    """Partition sites so that those of each part can share a group."""
    partitions = partition_by_page_offset([site.site_offset for site in sites])
    return [[sites[position] for position in partition.members] for partition in partitions]


def _missing_pids(group: Group[S], wanted: Sequence[S]) -> frozenset[int] | None:
    """Return the pids that the group has to patch in addition, or None if it has to be replaced."""
    scopes = {site.scope for site in wanted}
    if group.is_stale or len(wanted) != len(group.sites) or len(scopes) != 1:
        return None
    (scope,) = scopes
    if scope == group.scope:
        return frozenset()
    if scope is None or group.scope is None or not group.scope < scope:
        return None
    return scope - group.scope
