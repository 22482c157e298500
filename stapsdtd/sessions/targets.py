"""What an engine is asked to arm: an object's sites, with a subscription's filter and action at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stapsdtd import model
from stapsdtd.capture.engine import Engine, Target, TargetSite
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.query.actions import Action, Aggregate, Emit
from stapsdtd.query.site_filter import SiteFilter
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
    return Target(
        obj,
        file_path,
        tuple(
            TargetSite(
                each.capture.site,
                subscription.id_to_arm(obj, each),
                _action(engine, subscription, obj, site_filter),
                wanted_in(subscription, each),
                site_filter.tested,
            )
            for each, site_filter in selected
        ),
        exclude_pids=subscription.excluded & pids,
        exclude_later=subscription.excluded - pids,
        is_ephemeral=request.is_ephemeral,
        owners=subscription.spec.owners,
        owner=_objects_owner(pids) if request.is_ephemeral else "",
    )


def _action(engine: Engine, subscription: Subscription, obj: Object, site_filter: SiteFilter) -> Action:
    """Return what the engine is to do at a site: of an aggregation, as much as it can.

    It cannot add up hits that the daemon has to filter.
    """
    aggregation = subscription.spec.aggregation
    if aggregation is None or site_filter.evaluated is not None:
        return Emit(site_filter.captures)
    if engine.why_not_aggregated(aggregation, site_filter.site, obj.parsed.architecture) is not None:
        return Emit(site_filter.captures)
    return Aggregate(aggregation)


def _objects_owner(pids: Iterable[int]) -> str:
    """Name the user of the first process as an owner of ephemeral objects' events."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")
