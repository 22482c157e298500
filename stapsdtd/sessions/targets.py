"""What an engine is asked to arm: an object's sites, with a clause's filter and action at each."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from stapsdtd import model
from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.capture.engine import Engine, Target, TargetSite
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, SiteCapture
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.query.actions import Action, Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.query.site_filter import SiteFilter, WhyNotCaptured, why_not_at_hit
from stapsdtd.runtime.slices import Turn
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.matcher import wanted_in
from stapsdtd.sessions.subscription import Subscription


@dataclass(frozen=True, slots=True)
class ArmRequest:
    """mappings: by pid of the processes that map the object. named: if its file is held. is_quiet, only_in: see
    `ConsideredObject`. note: what limits all of them that are armed.
    """

    object: Object
    selected_sites: tuple[SelectedSite, ...]
    mappings: Mapping[int, model.Mapping]
    is_ephemeral: bool
    named: NamedFile | None = None
    is_quiet: bool = False
    only_in: frozenset[int] | None = None
    note: str = ""

    def note_of(self, selected: SelectedSite) -> str:
        """Return what limits a site that is armed, for users."""
        site = selected.capture.site
        duplicate = self.object.parsed.duplicates.get((site.provider, site.name, site.site_offset), "")
        return "; ".join(filter(None, [self.note, duplicate]))


FilteredSite = tuple[SelectedSite, SiteFilter]


def target_in_steps(
    engine: Engine,
    subscription: Subscription,
    clause: Clause,
    request: ArmRequest,
    selected: Iterable[FilteredSite],
    *,
    file_path: str,
) -> Generator[None, None, Target]:
    """Return what an engine is to arm for a clause. selected: the sites, and how their hits are filtered."""
    obj, pids = request.object, request.mappings.keys()
    sites: list[TargetSite] = []
    turn = Turn()
    for each, site_filter in selected:
        if turn.is_over:
            yield
            turn.begin()
        action, late = _action(engine, clause, obj, each.capture, site_filter)
        site_id = clause.id_to_arm(obj, each.capture, late)
        wanted = wanted_in(subscription, each)
        if wanted is None:
            wanted = request.only_in
        link = clause.spec.chain.link_of(obj.path, each.capture.site) if clause.spec.chain else None
        sites.append(TargetSite(each.capture.site, site_id, action, wanted, site_filter.tested, link))
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


def _action(
    engine: Engine, clause: Clause, obj: Object, wanted: SiteCapture, hits: SiteFilter
) -> tuple[Action, str | None]:
    """Return what the engine is to do at a site, and why the daemon has to add up, if it does. hits: see target_of."""
    spec = clause.spec
    if spec.span is None:
        return _made_of(engine, spec.aggregation, obj, hits)
    if not clause.engine_pairs:
        reason = engine.why_not_paired(spec.span.span) or "its filter is evaluated after the hit"
        return Emit(hits.captures), reason if spec.aggregation else None
    if wanted.is_start:
        return BeginSpan(spec.span.span, spec.filter_of_starts(wanted, in_engine=True).tested), None
    pairs = spec.filter_of_pairs(wanted, in_engine=True)
    action, late = _made_of(engine, spec.aggregation, obj, pairs)
    is_start_filtered = spec.span.start_predicate is not None
    return EndSpan(spec.span.span, action, pairs.tested, is_start_filtered=is_start_filtered), late


def _made_of(
    engine: Engine, aggregation: Aggregation | None, obj: Object, events: SiteFilter
) -> tuple[Emit | Aggregate, str | None]:
    """Return what is to be made of events, or pairs: rows, as far as the engine can."""
    if aggregation is None:
        return Emit(events.captures), None
    late = _why_added_late(engine, aggregation, obj, events)
    return (Emit(events.captures), late) if late is not None else (Aggregate(aggregation), None)


def _why_added_late(engine: Engine, aggregation: Aggregation, obj: Object, site_filter: SiteFilter) -> str | None:
    """Return why the daemon has to add up a site's hits, or None if the engine can."""
    if site_filter.evaluated is not None:
        return "its filter is evaluated after the hit"
    return engine.why_not_aggregated(aggregation, site_filter.site, obj.parsed.architecture)


def why_not_computed(
    aggregation: Aggregation | None, wanted: SiteCapture, why_not_captured: WhyNotCaptured
) -> str | None:
    """Return why a key or a value cannot be computed of a site's hits, or None if all can be."""
    if aggregation is None or wanted.is_start:
        return None
    for computed in aggregation.computed:
        if reason := computed.why_not_at(wanted.site):
            return reason
        for capture in computed.captures:
            if reason := why_not_at_hit(capture, wanted.site, why_not_captured):
                return f"cannot compute {computed.text}: {reason}"
    return None


def _objects_owner(pids: Iterable[int]) -> str:
    """Name the user of the first process as an owner of ephemeral objects' events."""
    return next((f"objects of uid {user_of(pid)}" for pid in pids), "")
