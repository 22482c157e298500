"""What an engine is asked to arm: an object's sites, with a subscription's filter and action at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stapsdtd import model
from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.capture.engine import Engine, Target, TargetSite
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, Site, SiteCapture
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.query.actions import Aggregate, Emit
from stapsdtd.query.site_filter import SiteFilter, WhyNotCaptured
from stapsdtd.sessions.matcher import wanted_in
from stapsdtd.sessions.subscription import Subscription


@dataclass(frozen=True, slots=True)
class ArmRequest:
    """mappings: by pid of the processes that map the object. named: if its file is held. is_quiet: see
    `ConsideredObject`.
    """

    object: Object
    selected_sites: tuple[SelectedSite, ...]
    mappings: Mapping[int, model.Mapping]
    is_ephemeral: bool
    named: NamedFile | None = None
    is_quiet: bool = False


FilteredSite = tuple[SelectedSite, SiteFilter]


def target_of(
    engine: Engine,
    subscription: Subscription,
    request: ArmRequest,
    file_path: str,
    selected: Iterable[FilteredSite],
) -> Target:
    """Return what an engine is to arm. selected: the sites, and how their hits are filtered."""
    obj, pids = request.object, request.mappings.keys()
    aggregation = subscription.spec.aggregation
    sites: list[TargetSite] = []
    for each, site_filter in selected:
        late = _why_added_late(engine, aggregation, obj, site_filter) if aggregation else None
        action = Aggregate(aggregation) if aggregation and late is None else Emit(site_filter.captures)
        site_id = subscription.id_to_arm(obj, each, late)
        wanted = wanted_in(subscription, each)
        sites.append(TargetSite(each.capture.site, site_id, action, wanted, site_filter.tested))
    return Target(
        obj,
        file_path,
        tuple(sites),
        exclude_pids=subscription.excluded & pids,
        exclude_later=subscription.excluded - pids,
        is_ephemeral=request.is_ephemeral,
        owners=subscription.spec.owners,
        owner=_objects_owner(pids) if request.is_ephemeral else "",
    )


def _why_added_late(engine: Engine, aggregation: Aggregation, obj: Object, site_filter: SiteFilter) -> str | None:
    """Return why the daemon has to add up a site's hits, or None if the engine can."""
    if site_filter.evaluated is not None:
        return "its filter is evaluated after the hit"
    return engine.why_not_aggregated(aggregation, site_filter.site, obj.parsed.architecture)


def why_not_computed(aggregation: Aggregation | None, site: Site, why_not_captured: WhyNotCaptured) -> str | None:
    """Return why a key or a value cannot be computed at a site, or None if all can be."""
    for computed in aggregation.computed if aggregation else ():
        if reason := computed.why_not_at(site):
            return reason
        wanted = SiteCapture(site, computed.captures)
        for position, capture in enumerate(wanted.captures):
            if reason := why_not_captured(capture, wanted.subject(position)):
                return f"cannot compute {computed.text}: {reason}"
    return None


def _objects_owner(pids: Iterable[int]) -> str:
    """Name the user of the first process as an owner of ephemeral objects' events."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")
