"""Matches objects against a subscription's selectors and scope."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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


def is_in_scope(subscription: Subscription, pids: Iterable[int], named: Collection[int] | None = None) -> bool:
    """Report whether any process is in the subscription's scope. named: the only ones that selectors name, if so."""
    owners = subscription.spec.owners
    wanted = set(pids) - subscription.excluded
    if subscription.pids is not None:
        wanted &= subscription.pids
    if named is not None:
        wanted.intersection_update(named)
    return bool(wanted) if owners is None else any(belongs(pid, owners) for pid in wanted)


def is_mapped_in_scope(subscription: Subscription, selected: Sequence[SelectedSite], pids: Iterable[int]) -> bool:
    """Report whether any of the processes that map an object is in the subscription's scope."""
    if any(each.pids is None for each in selected):
        return is_in_scope(subscription, pids)
    return is_in_scope(subscription, pids, frozenset().union(*(each.pids or () for each in selected)))
