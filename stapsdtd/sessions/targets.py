"""What an engine is asked to arm: an object's sites, with a subscription's filter and action at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stapsdtd import model
from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.capture.engine import Engine, Target, TargetSite
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, SiteCapture
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.query.actions import Action, Aggregate, BeginSpan, Emit, EndSpan
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
                _action(engine, subscription, obj, each.capture, site_filter),
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


def _action(engine: Engine, subscription: Subscription, obj: Object, wanted: SiteCapture, hits: SiteFilter) -> Action:
    """Return what the engine is to do at a site: as much as it can.

    It cannot add up, nor pair, hits that the daemon has to filter. hits: how they are filtered.
    """
    spec = subscription.spec
    if spec.span is None:
        return _made_of(engine, spec.aggregation, obj, hits)
    if not subscription.engine_pairs:
        return Emit(hits.captures)
    if wanted.is_start:
        return BeginSpan(spec.span.span)
    action = _made_of(engine, spec.aggregation, obj, spec.filter_of_pairs(wanted))
    return EndSpan(spec.span.span, action)


def _made_of(engine: Engine, aggregation: Aggregation | None, obj: Object, events: SiteFilter) -> Emit | Aggregate:
    """Return what is to be made of events, or pairs."""
    if aggregation is None or events.evaluated is not None:
        return Emit(events.captures)
    if engine.why_not_aggregated(aggregation, events.site, obj.parsed.architecture) is not None:
        return Emit(events.captures)
    return Aggregate(aggregation)


def _objects_owner(pids: Iterable[int]) -> str:
    """Name the user of the first process as an owner of ephemeral objects' events."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")
