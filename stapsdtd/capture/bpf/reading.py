"""How each subscription reads a plan's records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stapsdtd.aggregate.aggregation import Key, Row
from stapsdtd.capture.bpf.constants import SiteConstants
from stapsdtd.capture.bpf.sources import Layout
from stapsdtd.capture.bpf.tables import PlanEntry
from stapsdtd.capture.engine import LossStage, ManyRows, RowSink, Sink, SubscriptionKey
from stapsdtd.events.batch import EventBatch, merge
from stapsdtd.spans.span import SpanCounts

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Channel:
    """A subscription as the reader sees it.

    excluded: processes whose events are left out; they may have mapped an object after the program was told. is_open:
    false once the subscription has ended, though plans that could not be replaced may still bring it events. rows:
    takes what hits add up to. client: who pays for reading its events.
    """

    subscription_key: SubscriptionKey
    sink: Sink
    excluded: frozenset[int] = frozenset()
    is_open: bool = True
    rows: RowSink | None = None
    client: str = ""

    def deliver(self, batches: Sequence[EventBatch]) -> None:
        """Deliver events of one stretch of time."""
        if not self.is_open:
            return
        kept = [rest for batch in batches if len(rest := self._without_excluded(batch))]
        if not kept:
            return
        try:
            self.sink.deliver(merge(kept))
        except Exception:  # noqa: BLE001 - one subscription's failure must not affect others
            _log.exception("events could not be delivered")
            self.lost(LossStage.DECODE, sum(map(len, kept)))

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        if not self.is_open or self.rows is None:
            return
        try:
            self.rows.aggregated(site_id, rows)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("rows could not be delivered")
            self.lost(LossStage.DECODE, sum(row.count for row in rows.values()))

    def aggregated_many(self, rows: ManyRows) -> None:
        if not self.is_open or self.rows is None:
            rows.drop()
            return
        hits = rows.hits
        try:
            self.rows.aggregated_many(rows)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("rows could not be delivered")
            rows.drop()
            self.lost(LossStage.DECODE, hits)

    def fired(self, count: int) -> None:
        self._report(self.sink.fired, count)

    def filtered(self, count: int, undecided: int = 0) -> None:
        self._report(partial(self.sink.filtered, undecided=undecided), count)

    def lost(self, stage: LossStage, count: int) -> None:
        self._report(partial(self.sink.lost, stage), count)

    def spanned(self, counts: SpanCounts) -> None:
        self._report(lambda _: self.sink.spanned(counts), 0)

    def _report(self, report: Callable[[int], None], count: int) -> None:
        if not self.is_open:
            return
        try:
            report(count)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("a subscription's counters could not be reported")

    def _without_excluded(self, batch: EventBatch) -> EventBatch:
        if not self.excluded:
            return batch
        is_excluded = np.isin(batch.pid, list(self.excluded))
        count = int(np.count_nonzero(is_excluded))
        if not count:
            return batch
        self.filtered(count)
        return batch.take(np.flatnonzero(~is_excluded))


@dataclass(frozen=True, slots=True)
class Reading:
    """How one subscription reads a plan's records: those its filter accepted, as events of site_id.

    bit: of its filter, in the record's `matched`. is_complete: whether all of the filter's hits have records, rather
    than those that could not be added to a row.
    """

    channel: Channel
    bit: int
    site_id: int
    layout: Layout
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Counted:
    """A consumer for which hits have to be counted only, since all have the same key and no value.

    bit: of its filter. site_id: as `RowSink.aggregated` takes it.
    """

    channel: Channel
    bit: int
    site_id: int
    key: Key


@dataclass(frozen=True, slots=True)
class Added:
    """A consumer whose hits the program adds to rows of a table. table: its number."""

    channel: Channel
    table: int


@dataclass(frozen=True, slots=True)
class Paired:
    """A consumer whose starts or ends the program pairs.

    span: the number of its table. bit: of an end's filter, which no other consumer has; None of a start's. counted: if
    pairs have to be counted only.
    """

    channel: Channel
    span: int
    bit: int | None
    counted: Counted | None = None


@dataclass(slots=True, eq=False)
class ActivePlan:
    """A plan whose records may be in the rings.

    channels: of all consumers, with their filters' bits. readings: of those that want events. constants: the read-only
    part of the file, for values that hits could not read; abs_ip_at: the position of the value that relates a hit to
    it. counted: consumers that aggregate without a table. added: those with one, in the order of the plan's recipes.
    paired: those that pair, in the order of its pairings. received: how many records each filter accepted, by its bit.
    """

    entry: PlanEntry
    channels: tuple[tuple[int, Channel], ...]
    readings: tuple[Reading, ...]
    tested: int
    constants: SiteConstants | None = None
    abs_ip_at: int = 0
    counted: tuple[Counted, ...] = ()
    added: tuple[Added, ...] = ()
    paired: tuple[Paired, ...] = ()
    received: dict[int, int] = field(default_factory=dict)

    @property
    def is_paired(self) -> bool:
        """Report whether a pairing counts all hits that are not filtered, in place of the counter of hits."""
        return len(self.paired) == len(self.channels) == 1
