"""Matches objects against a subscription's selectors and scope."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from stapsdtd import model
from stapsdtd.capture.engine import Scope
from stapsdtd.catalog.selectors import SelectedSite, choose
from stapsdtd.kernel.ownership import belongs
from stapsdtd.model import Object, SiteCapture
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.sessions.spec import ClauseSpec
from stapsdtd.sessions.subscription import Subscription


def selected_sites(
    subscription: Subscription, obj: Object, mappings: Mapping[int, model.Mapping], named: NamedFile | None = None
) -> tuple[SelectedSite, ...]:
    """Return the sites of an object that are wanted. mappings: by pid. named: if the client named the file."""
    if not mappings and named is None and not obj.is_kernel:
        return ()
    # a file with several names is one object, named by the first that was seen
    names = dict.fromkeys([obj.path, *(mapping.path for mapping in mappings.values())])
    if named is not None:
        names[named.path] = None
    chosen: list[SelectedSite] = []
    for position, clause in enumerate(subscription.spec.clauses):
        by_name = (_chosen(position, clause, name, obj) for name in names)
        chosen += next(filter(None, by_name), [])
    return tuple(selected for selected in chosen if wanted_in(subscription, selected) != frozenset())


def _chosen(position: int, spec: ClauseSpec, name: str, obj: Object) -> list[SelectedSite]:
    """Return the sites of an object of this name that a clause selects, and what is captured at each."""
    sites = obj.parsed.sites
    chosen = [_capturing(each, spec.captured(each.capture), position) for each in choose(spec.selectors, name, sites)]
    if spec.span is None:
        return chosen
    ends = {each.capture.site for each in chosen}
    captures = spec.span.span.start_captures
    return chosen + [
        replace(each, capture=SiteCapture(each.capture.site, captures, is_start=True), clause=position)
        for each in choose(spec.span.selectors, name, sites)
        # a site that is both is refused as an end
        if each.capture.site not in ends
    ]


def _capturing(selected: SelectedSite, capture: SiteCapture, position: int) -> SelectedSite:
    if capture.captures == selected.capture.captures and capture.listed is None and position == selected.clause:
        return selected
    return replace(selected, capture=capture, clause=position)


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


def is_mapped_in_scope(subscription: Subscription, selected: Sequence[SelectedSite], pids: Iterable[int]) -> bool:
    """Report whether any of the processes that map an object is in the subscription's scope."""
    owners = subscription.spec.owners
    wanted = set(pids) - subscription.excluded
    if subscription.pids is not None:
        wanted &= subscription.pids
    if all(each.pids is not None for each in selected):
        wanted &= frozenset().union(*(each.pids or () for each in selected))
    return bool(wanted) if owners is None else any(belongs(pid, owners) for pid in wanted)
