"""One clause of a subscription: the engine's sink on one side, what a stream reads on the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from stapsdtd.aggregate.table import Snapshot, Table
from stapsdtd.capture.engine import LossStage, SubscriptionKey
from stapsdtd.catalog.selectors import SelectedSite
from stapsdtd.model import Object, Site, SiteCapture
from stapsdtd.query.evaluate import steps
from stapsdtd.query.expression import Condition
from stapsdtd.query.site_filter import WhyNotCaptured, evaluated_late
from stapsdtd.runtime.futures import once_done, pass_on
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.aggregator import Aggregator
from stapsdtd.sessions.condition import ConditionFilter
from stapsdtd.sessions.evaluating import Evaluating
from stapsdtd.sessions.fields import FieldComputer
from stapsdtd.sessions.log import EventLog
from stapsdtd.sessions.pairing import Pairing
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.sink import Account, EventFilter, EventSink
from stapsdtd.sessions.site_ids import KnownSite, SiteIds
from stapsdtd.sessions.spec import ClauseSpec
from stapsdtd.spans.span import NO_OPEN_SPANS, OpenSpans, Thread

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_PAIRING_STEPS = 200
"""Some 3 us for each event."""


class Clause:
    """Shared by three threads: the arming thread arms its sites, the engine's reader delivers to `sink`, the API's
    streams read `log` or `table`.
    """

    def __init__(
        self,
        name: str,
        key: SubscriptionKey,
        spec: ClauseSpec,
        sites: SiteIds,
        client: Principal,
        *,
        filters: Sequence[EventFilter],
        notify: Callable[[], None],
        queue_bytes: int,
        engine_pairs: bool,
        open_in_engine: Callable[[], OpenSpans] = lambda: NO_OPEN_SPANS,
        evaluating: Evaluating | None = None,
    ) -> None:
        """name: for messages. key: the engine knows each clause as a subscription of its own. filters: of the
        subscription. notify: called when there is something new to read. engine_pairs: if there is a span, the
        engine delivers pairs. open_in_engine: see `Engine.open_spans`. evaluating: evaluates what engines do
        not test; None to do that in the engine's thread.
        """
        self.key = key
        self.spec = spec
        self.sites = sites
        self.engine_pairs = engine_pairs
        self._client = client.name
        self._open_in_engine = open_in_engine
        self._open_at_end: OpenSpans | None = None
        self.closed_ns: int | None = None
        self.log = EventLog(queue_bytes, notify)
        aggregator = Aggregator(spec.aggregation, sites.known, queue_bytes) if spec.aggregation else None
        self.table: Table | None = aggregator.table if aggregator else None
        self.pairing: Pairing | None = None
        if spec.span and not engine_pairs:
            starts = ConditionFilter(spec.filter_of_starts_alone, sites.known) if spec.span.start_predicate else None
            self.pairing = Pairing(spec.span.span, sites.known, spec.of_pairs, queue_bytes, starts=starts)
        filter_of_pairs = partial(spec.filter_of_pairs, in_engine=engine_pairs)
        self.sink = EventSink(
            name,
            self.log,
            client,
            filters,
            notify,
            aggregator=aggregator,
            condition=None if spec.is_unfiltered else ConditionFilter(spec.filter_at, sites.known),
            pairing=self.pairing,
            computer=FieldComputer(spec.fields, sites.known) if spec.computes and not spec.aggregation else None,
            pair_condition=ConditionFilter(filter_of_pairs, sites.known) if spec.filters_pairs else None,
            hit=sites.hit,
            backlog=None if evaluating is None else evaluating.backlog(client.name, self._steps),
        )

    @property
    def _steps(self) -> int:
        """How many steps are taken in the daemon for each byte of events, about."""
        return steps(self.spec.expressions) + (_PAIRING_STEPS if self.pairing else 0)

    def why_not_paired(self, selected: SelectedSite, why_not: WhyNotCaptured) -> str | None:
        """See `ClauseSpec.why_not_paired`."""
        return self.spec.why_not_paired(selected, why_not, in_engine=self.engine_pairs)

    def id_to_arm(self, found: Object, capture: SiteCapture, added_late: str | None = None) -> int:
        """See `SiteIds.id_to_arm`. Call this from the arming thread."""
        return self.sites.id_to_arm(found, capture, added_late)

    def armed(self, site_ids: Collection[int]) -> None:
        self.sites.arm(site_ids)

    def retired(self, site_ids: Iterable[int]) -> None:
        """Take note that sites were disarmed or refused."""
        self.sites.retire(site_ids, self.log.next_seq)

    def settled(self, engine: Future[_T]) -> Future[_T]:
        """Return a future that is done, in any thread, when all hits were evaluated that the engine delivers until its
        future is done, with what became of that one.
        """
        done: Future[_T] = Future()
        done.set_running_or_notify_cancel()
        once_done(engine, lambda _: once_done(self.sink.settled(), lambda _: pass_on(engine, done)))
        return done

    def forget_unused_sites(self) -> None:
        self.sites.forget_unused(self.log.first_kept)

    def swept(self, ended: Iterable[Thread], now_ns: int) -> Generator[None, None, None]:
        """Count starts without an end to come, in steps; see `Pairing.sweep`."""
        if self.pairing is not None:
            self.sink.spanned((yield from self.pairing.sweep(ended, now_ns)))

    def open_spans(self) -> Generator[None, None, OpenSpans]:
        """Return, in steps, the starts that wait for their ends, or that did when the engine closed the clause."""
        return self._open_of_engine() if self.pairing is None else (yield from self.pairing.open_spans())

    def _open_of_engine(self) -> OpenSpans:
        if self.spec.span is None or self._open_at_end is not None:
            return self._open_at_end or NO_OPEN_SPANS
        try:
            return self._open_in_engine()
        except OSError as error:
            _log.warning("cannot tell which spans are open: %s", error, extra=fields(client=self._client))
            return NO_OPEN_SPANS

    def close(self) -> None:
        """Keep what the engine knows only until it closes the clause."""
        self.closed_ns = time.monotonic_ns()
        if self.pairing is None:
            self._open_at_end = self._open_of_engine()

    def known_sites(self, site_ids: Iterable[int]) -> dict[int, KnownSite]:
        """Return sites by their ids, without those that were forgotten."""
        return self.sites.known(site_ids)

    def evaluated_late(self, sites: Collection[Site]) -> Generator[None, None, dict[Condition, str]]:
        """Return which parts of the filter the engine tests neither of hits nor of the pairs that it makes, and why."""
        of_pairs = self.spec.span.pair_predicate if self.spec.span else None
        of_hits = yield from evaluated_late(self.spec.predicate, sites)
        return of_hits | (yield from evaluated_late(of_pairs, sites))

    def added_late(self) -> dict[str, int]:
        """See `SiteIds.added_late`."""
        return self.sites.added_late()

    def losses(self) -> dict[LossStage, int]:
        """Return how many events were lost so far, by stage."""
        return self.sink.losses()

    def account(self, snapshot: Snapshot | None = None) -> Account:
        """As of now, or of a snapshot that was taken now; see `EventSink.account`."""
        return self.sink.account(self.sites.armed, snapshot)
