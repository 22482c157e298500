"""Matches objects against a subscription's selectors and scope."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from stapsdtd.capture.engine import Scope
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.kernel.ownership import belongs
from stapsdtd.model import Object
from stapsdtd.sessions.choices import Choices
from stapsdtd.sessions.subscription import Subscription


def selected_sites(
    subscription: Subscription, choices: Choices, obj: Object, names: Collection[str]
) -> tuple[SelectedSite, ...]:
    """Return the sites of an object that are wanted. names: those that it has."""
    chosen = choices.of(obj, names)
    return tuple(selected for selected in chosen if wanted_in(subscription, selected) != frozenset())


def has_semaphores(selected: Iterable[SelectedSite]) -> bool:
    return any(each.capture.site.semaphore_offset is not None for each in selected)


def wanted_in(subscription: Subscription, selected: SelectedSite) -> Scope:
    """Return the processes whose hits of a site are wanted."""
    if selected.pids is None:
        return subscription.scope
    pids = subscription.pids
    return selected.pids if pids is None else pids & selected.pids


def is_wanted_unmapped(subscription: Subscription, selected: Sequence[SelectedSite], *, is_installed: bool) -> bool:
    """Report whether sites are wanted in processes that do not map their object yet.

    is_installed: no client named its file, so nobody says that the process of a selector is going to map it.
    """
    may_map_later = subscription.pids is None or subscription.spec.scope.follow
    return may_map_later and any(each.pids is None or not is_installed for each in selected)


Belongs = Callable[[int, frozenset[int]], bool]
"""`kernel.ownership.belongs`."""


class Belonging:
    """Which processes belong to users, as of one turn of an event loop: many objects are considered in it, each of
    which hundreds of processes may map.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[tuple[int, frozenset[int]], bool] = {}

    def __call__(self, pid: int, users: frozenset[int]) -> bool:
        found = self._known.get((pid, users))
        if found is None:
            if not self._known:
                self._loop.call_soon(self._known.clear)
            found = self._known[pid, users] = belongs(pid, users)
        return found


def is_in_scope(
    subscription: Subscription,
    pids: Iterable[int],
    named: Collection[int] | None = None,
    *,
    belongs: Belongs = belongs,
) -> bool:
    """Report whether any process is in the subscription's scope. named: the only ones that selectors name, if so."""
    owners = subscription.spec.owners
    wanted = set(pids) - subscription.excluded
    if subscription.pids is not None:
        wanted &= subscription.pids
    if named is not None:
        wanted.intersection_update(named)
    return bool(wanted) if owners is None else any(belongs(pid, owners) for pid in wanted)


def is_mapped_in_scope(
    subscription: Subscription,
    selected: Sequence[SelectedSite],
    pids: Iterable[int],
    *,
    belongs: Belongs = belongs,
) -> bool:
    """Report whether any of the processes that map an object is in the subscription's scope."""
    if any(each.pids is None for each in selected):
        return is_in_scope(subscription, pids, belongs=belongs)
    named = frozenset().union(*(each.pids or () for each in selected))
    return is_in_scope(subscription, pids, named, belongs=belongs)
