"""What a client asked for, validated and with the server's defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.catalog.selectors import SelectedSite, Selector
from stapsdtd.functions.chain import Chain
from stapsdtd.model import BuiltIn, Capture, SiteCapture
from stapsdtd.procs.named_files import Credentials
from stapsdtd.query.expression import Condition, Expression
from stapsdtd.query.site_filter import SiteFilter, WhyNotCaptured, divided, subject_text, why_not_at_hit
from stapsdtd.query.sources import ExpressionSource
from stapsdtd.sessions.fields import ComputedField, Field, captured
from stapsdtd.sessions.own_clients import ClientFilter, ConnectedClients
from stapsdtd.spans.span import Span, of_start
from stapsdtd.subscribe_options import Scope


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """selectors: choose the starts. predicate: what is required of a hit to be a start. start_predicate: what is
    required of the start of a pair that is wanted, pair_predicate: of the pair; others are paired all the same, and
    count as filtered. None if all are wanted. report_open_ns: after how long a start is told of that still waits; 0 for
    never.
    """

    span: Span
    selectors: tuple[Selector, ...]
    predicate: Condition | None = None
    start_predicate: Condition | None = None
    pair_predicate: Condition | None = None
    report_open_ns: int = 0


@dataclass(frozen=True, slots=True)
class ClauseSpec:
    """One clause: which hits, and what to do at them.

    tag: the client's name for it. where: the client's text; predicate: what that and the scope test, None if all hits
    are wanted. fields: what events tell besides what its selector says. aggregation: what is computed instead
    of delivering events, None for events. span: if the hits that selectors choose are to be paired with starts. chain:
    of kernel functions, if only hits are wanted in calls of these that led to each other.
    """

    selectors: tuple[Selector, ...]
    where: str = ""
    predicate: Condition | None = None
    fields: tuple[Field, ...] = ()
    aggregation: Aggregation | None = None
    span: SpanSpec | None = None
    chain: Chain | None = None
    tag: str = ""

    @property
    def _predicates(self) -> list[Condition]:
        """What is required of hits, starts that do not satisfy it included."""
        of_span = (self.span.predicate, self.span.start_predicate) if self.span else ()
        return [each for each in (self.predicate, *of_span) if each is not None]

    @property
    def is_unfiltered(self) -> bool:
        """Report whether all hits are wanted."""
        return self.predicate is None and (self.span is None or self.span.predicate is None)

    @property
    def filters_pairs(self) -> bool:
        """Report whether some pairs may not be wanted."""
        return self.span is not None and self.span.pair_predicate is not None

    @property
    def is_tested(self) -> bool:
        """Report whether engines can test all that is required of a hit, whatever its site."""
        return not any(divided(predicate)[1] for predicate in self._predicates)

    @property
    def computes(self) -> bool:
        """Report whether events have values that are computed of others."""
        return any(isinstance(field, ComputedField) for field in self.fields)

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """What may be left to be evaluated of events."""
        pair_predicate = self.span.pair_predicate if self.span else None
        computed = [field.source.expression for field in self.fields if isinstance(field, ComputedField)]
        columns = self.aggregation.columns if self.aggregation else ()
        keys = [column.expression for column in columns if isinstance(column, ExpressionSource)]
        return (*self._predicates, *([pair_predicate] if pair_predicate else []), *computed, *keys)

    def captured(self, selected: SiteCapture) -> SiteCapture:
        """Return what an event, or an aggregation, takes of a site. selected: what its selector says."""
        if self.aggregation is not None:
            return replace(selected, captures=self.aggregation.captures)
        listed = selected.captures
        if self.span is not None:
            listed = *listed, *map(of_start, self.span.span.start_captures), Capture(BuiltIn.ELAPSED)
        captures = listed + captured(self.fields, selected.site)
        return replace(selected, captures=captures, listed=len(listed) if self.computes else None)

    def why_not_paired(self, selected: SelectedSite, why_not: WhyNotCaptured, *, in_engine: bool) -> str | None:
        """Return why hits of a site cannot be paired, or None if they can."""
        if self.span is None:
            return None
        wanted = selected.capture
        if selected.is_both:
            return "it would be both the start and the end of a span"
        of_start = self.filter_of_starts(wanted, in_engine=in_engine)
        if in_engine and (self.filter_at(wanted).evaluated is not None or of_start.evaluated is not None):
            return "its filter cannot be tested where it hits, so that the engine cannot pair it"
        for part in self.span.span.key:
            if isinstance(part, Capture) and (reason := why_not_at_hit(part, wanted.site, why_not)):
                return f"cannot pair by {subject_text(part)}: {reason}"
        return (of_start if wanted.is_start else self.filter_of_pairs(wanted, in_engine=in_engine)).why_not(why_not)

    def filter_at(self, wanted: SiteCapture) -> SiteFilter:
        """Return how hits of a site are filtered, and what has to be captured of them."""
        if self.span is None:
            return SiteFilter.of(self.predicate, wanted)
        predicate = self.span.predicate if wanted.is_start else self.predicate
        return SiteFilter.of(predicate, self.span.span.at_hit(self.of_pairs(wanted)))

    def of_pairs(self, wanted: SiteCapture) -> SiteCapture:
        """Return what has to be known of starts at a site, or of the pairs that end there, before they are filtered."""
        of = self.filter_of_starts if wanted.is_start else self.filter_of_pairs
        return replace(wanted, captures=of(wanted, in_engine=False).captures)

    def filter_of_starts(self, wanted: SiteCapture, *, in_engine: bool) -> SiteFilter:
        """Return which starts at a site make pairs that are wanted. in_engine: as `filter_of_pairs`."""
        is_filtered = self.span is not None and wanted.is_start
        return SiteFilter.of(
            self.span.start_predicate if is_filtered and self.span else None, wanted, in_engine=in_engine
        )

    def filter_of_starts_alone(self, wanted: SiteCapture) -> SiteFilter:
        """Return which of the starts that the daemon pairs make pairs that are wanted. Ends are not filtered."""
        if self.span is None:
            raise ValueError("no hit is a start")
        return self.filter_of_starts(self.span.span.at_hit(self.of_pairs(wanted)), in_engine=False)

    def filter_of_pairs(self, wanted: SiteCapture, *, in_engine: bool) -> SiteFilter:
        """Return how the pairs of a span are filtered whose end is at a site. in_engine: if it makes them."""
        return SiteFilter.of(self.span.pair_predicate if self.span else None, wanted, in_engine=in_engine)


@dataclass(frozen=True, slots=True)
class SubscriptionSpec:
    """A subscription, of at least one clause.

    owners: the users whose own processes the client may see, None for all; nothing is revealed of others.
    subscriber_pid: the client's own process, None if unknown. files: paths as in maps of files, or of their
    directories, to which probes are restricted; None for no restriction. credentials: with whose rights installed files
    are opened; None to wait until a process maps them. has_functions: it may choose kernel functions.
    children: the processes that those to follow had forked before. excluded_probes: by normalized provider and name,
    what selectors do not choose.
    """

    clauses: tuple[ClauseSpec, ...]
    scope: Scope
    lease_seconds: int
    queue_bytes: int
    kernel_buffer_kib: int
    owners: frozenset[int] | None = None
    subscriber_pid: int | None = None
    files: frozenset[str] | None = None
    credentials: Credentials | None = None
    has_functions: bool = False
    children: frozenset[int] = frozenset()
    excluded_probes: frozenset[tuple[str, str]] = frozenset()

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selectors of all clauses, without starts of spans."""
        return tuple(selector for clause in self.clauses for selector in clause.selectors)

    def filter_of(self, clients: ConnectedClients) -> ClientFilter | None:
        """Return a filter that leaves out events of the daemon's own clients, or None if they are wanted."""
        if self.scope.include_clients or self.scope.pids or self.scope.execnames:
            return None
        named = {selector.provider_of_pid[1] for selector in self.selectors if selector.provider_of_pid}
        return ClientFilter(clients, named if self.subscriber_pid is None else named | {self.subscriber_pid})
