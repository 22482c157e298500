"""The engine's end of a clause: takes its events, and counts what becomes of each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from stapsdtd.aggregate.aggregation import Key, Row
from stapsdtd.aggregate.table import Snapshot
from stapsdtd.capture.engine import LossStage, ManyRows
from stapsdtd.events.batch import EventBatch, join
from stapsdtd.runtime.futures import finished
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.aggregator import Aggregator
from stapsdtd.sessions.condition import ConditionFilter
from stapsdtd.sessions.evaluating import Backlog, Parts
from stapsdtd.sessions.fairness import Admission, shared_out
from stapsdtd.sessions.fields import FieldComputer
from stapsdtd.sessions.log import ENTRY_OVERHEAD, EventLog
from stapsdtd.sessions.pairing import Pairing
from stapsdtd.sessions.principal import Principal
from stapsdtd.spans.span import SpanCounts

_log = logging.getLogger(__name__)

_RESERVE = 8
"""If only an eighth of the queue is left, what comes in is shared out among the processes, ..."""
_ALWAYS_ROOM = 16
"""... with at least so many events for each, even if the oldest events are discarded for it."""

_NO_SPANS = SpanCounts()


@dataclass(frozen=True, slots=True)
class Account:
    """fired = delivered + aggregated + filtered + lost_kernel_buffer + lost_queue + lost_decode + lost_quota +
    lost_table_full + lost_missed + lost_filter + in_flight + spans.consumed.

    undecided: of those filtered, how many there was no telling of, since the filter needs what could not be read, or
    divides by 0. valueless: of those aggregated, how many have no value, for the same reasons.
    """

    delivered: int = 0
    aggregated: int = 0
    filtered: int = 0
    lost_kernel_buffer: int = 0
    lost_queue: int = 0
    lost_decode: int = 0
    lost_quota: int = 0
    lost_table_full: int = 0
    lost_missed: int = 0
    lost_filter: int = 0
    undecided: int = 0
    valueless: int = 0
    in_flight: int = 0
    sites: int = 0
    spans: SpanCounts = _NO_SPANS

    def __add__(self, other: Account) -> Account:
        return Account(
            delivered=self.delivered + other.delivered,
            aggregated=self.aggregated + other.aggregated,
            filtered=self.filtered + other.filtered,
            lost_kernel_buffer=self.lost_kernel_buffer + other.lost_kernel_buffer,
            lost_queue=self.lost_queue + other.lost_queue,
            lost_decode=self.lost_decode + other.lost_decode,
            lost_quota=self.lost_quota + other.lost_quota,
            lost_table_full=self.lost_table_full + other.lost_table_full,
            lost_missed=self.lost_missed + other.lost_missed,
            lost_filter=self.lost_filter + other.lost_filter,
            undecided=self.undecided + other.undecided,
            valueless=self.valueless + other.valueless,
            in_flight=self.in_flight + other.in_flight,
            sites=self.sites + other.sites,
            spans=self.spans + other.spans,
        )

    @property
    def fired(self) -> int:
        accounted = self.delivered + self.aggregated + self.filtered + self.lost + self.spans.consumed
        return accounted + self.in_flight

    @property
    def lost(self) -> int:
        in_daemon = self.lost_queue + self.lost_decode + self.lost_quota + self.lost_filter
        return self.lost_kernel_buffer + in_daemon + self.lost_table_full + self.lost_missed


class EventFilter(Protocol):
    """Leaves out events that the kernel cannot."""

    def rest(self, batch: EventBatch) -> EventBatch:
        """Return a batch without them."""


class EventSink:
    """Puts one clause's events into its log, or adds them up. Implements `Sink` and `RowSink`."""

    def __init__(
        self,
        name: str,
        log: EventLog,
        client: Principal,
        filters: Sequence[EventFilter],
        on_loss: Callable[[], None],
        *,
        aggregator: Aggregator | None = None,
        condition: ConditionFilter | None = None,
        pairing: Pairing | None = None,
        pair_condition: ConditionFilter | None = None,
        computer: FieldComputer | None = None,
        hit: Callable[[Callable[[], Iterable[int]]], None] = lambda _: None,
        backlog: Backlog | None = None,
    ) -> None:
        """name: for messages. filters: what they leave out counts as filtered. on_loss is called
        after each loss. aggregator: takes the events instead of the log. condition: leaves out events, which
        takes time, so that it is only asked about those within the client's quota. pairing: makes pairs of them.
        pair_condition: leaves out pairs. computer: of the values that the log gets. hit: asks, if it wants to know,
        which sites fired. backlog: of events that wait for all this; None to do it at once.
        """
        self._name = name
        self._log = log
        self._client = client
        self._filters = filters
        self._on_loss = on_loss
        self._aggregator = aggregator
        self._condition = condition
        self._pairing = pairing
        self._computer = computer
        self._pair_condition = pair_condition
        self._hit = hit
        self._spans = _NO_SPANS
        self._admission = Admission()
        self._lock = threading.Lock()
        self._fired = 0
        self._filtered = self._undecided = 0
        self._lost = dict.fromkeys(LossStage, 0)
        self._backlog = backlog
        self._is_late = bool(aggregator or pairing or pair_condition or computer)

    def deliver(self, batch: EventBatch) -> None:
        """Count each event once: as filtered, as lost, or by the log, which takes all that it is given or none."""
        rest = len(batch)
        try:
            batch = self._in_scope(batch)
            rest = len(batch)
            self._hit(batch.site_ids)
            batch = self._within_quota(batch)
            rest = len(batch)
            if rest and self._backlog is not None and self._must_wait(batch):
                left_out = self._backlog.add(batch, self)
                rest = 0
                if left_out:
                    self.lost(LossStage.FILTER, left_out)
                return
        except Exception:  # noqa: BLE001 - what is not in the log by now never will be
            self.write_off(rest)
            return
        if rest and (kept := self.evaluate(batch)) is not None:
            self.keep([kept])

    def _must_wait(self, batch: EventBatch) -> bool:
        """Report whether there is something to evaluate. Once there was, all events wait, to keep their order."""
        if not self._is_late and self._condition is not None:
            self._is_late = self._condition.evaluates(batch)
        return self._is_late

    def evaluate(self, batch: EventBatch) -> EventBatch | None:
        """Do with events what engines do not. Return those for the log, None if there are none."""
        rest = len(batch)
        try:
            batch = self._satisfying(batch, self._condition)
            rest = len(batch)
            batch = self._paired(batch)
            rest = len(batch)
            batch = self._satisfying(batch, self._pair_condition)
            rest = len(batch)
            if not rest:
                return None
            if self._aggregator is not None:
                if left_out := self._aggregator.add(batch):
                    self.lost(LossStage.TABLE_FULL, left_out)
                return None
            return batch if self._computer is None else self._computer.computed(batch)
        except Exception:  # noqa: BLE001 - other events are to be evaluated nevertheless
            self.write_off(rest)
            return None

    def keep(self, batches: Sequence[EventBatch]) -> None:
        """Put events into the log, as far as there is room."""
        rest = sum(map(len, batches))
        try:
            batch = batches[0] if len(batches) == 1 else join(batches)
            if self._left() - batch.nbytes > self._log.max_bytes // _RESERVE:
                self._log.append(batch)
                return
            batch = self._within_queue(batch)
            rest = len(batch)
            if rest:
                self._log.append(batch, is_short=True)
                rest = 0
                self._admission.admitted(batch, self._log.end_bytes)
        except Exception:  # noqa: BLE001 - what is not in the log by now never will be
            self.write_off(rest)

    def write_off(self, count: int) -> None:
        """Count hits as lost by an error, which is being handled."""
        _log.exception("%s: events could not be kept", self._name, extra=fields(client=self._client.name))
        self.lost(LossStage.DECODE, count)

    def settled(self) -> Future[None]:
        """Return a future that is done, in any thread, when all events that were delivered so far were evaluated."""
        return finished() if self._backlog is None else self._backlog.settled()

    def _in_scope(self, batch: EventBatch) -> EventBatch:
        """Return the events that all filters leave, and count the others."""
        kept = batch
        for event_filter in self._filters if len(batch) else ():
            kept = event_filter.rest(kept)
        self.filtered(len(batch) - len(kept))
        return kept

    def _satisfying(self, batch: EventBatch, condition: ConditionFilter | None) -> EventBatch:
        """Return the events that satisfy a condition, and count the others."""
        if condition is None or not len(batch):
            return batch
        kept, undecided = condition.rest(batch)
        self.filtered(len(batch) - len(kept), undecided)
        return kept

    def _paired(self, batch: EventBatch) -> EventBatch:
        if self._pairing is None or not len(batch):
            return batch
        paired = self._pairing.add(batch)
        self.spanned(paired.counts)
        self.filtered(paired.unwanted, paired.undecided)
        if paired.unread:
            self.lost(LossStage.DECODE, paired.unread)
        return paired.pairs

    def _within_quota(self, batch: EventBatch) -> EventBatch:
        # read once, since another policy may replace it in the meantime
        quota = self._client.events
        if quota is None or (granted := quota.take(len(batch))) == len(batch):
            return batch
        return self._count_missing(batch, shared_out(batch, granted), LossStage.QUOTA)

    def _within_queue(self, batch: EventBatch) -> EventBatch:
        """Return as many events as may come in while the client reads too slowly."""
        self._admission.read(self._log.read_bytes)
        free = self._left() * len(batch) // batch.nbytes
        return self._count_missing(batch, self._admission.admit(batch, free, _ALWAYS_ROOM), LossStage.QUEUE)

    def _left(self) -> int:
        """Return how many bytes the next entry may take before unread events have to be discarded for it."""
        return max(self._log.max_bytes - self._log.unread_bytes - ENTRY_OVERHEAD, 0)

    def _count_missing(self, batch: EventBatch, kept: EventBatch, stage: LossStage) -> EventBatch:
        """Count the events that are not in kept as lost, and return kept."""
        if lost := len(batch) - len(kept):
            self.lost(stage, lost)
        return kept

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        """Take rows of hits, which fired() counts, too. Implements `capture.engine.RowSink`."""
        self._hit(lambda: [site_id])
        if self._aggregator is not None and (left_out := self._aggregator.add_rows(site_id, rows)):
            self.lost(LossStage.TABLE_FULL, left_out)

    def aggregated_many(self, rows: ManyRows) -> None:
        """Implements `capture.engine.RowSink`."""
        parts = Parts(rows, self)
        if self._backlog is not None:
            self._backlog.add_rows(parts)
            return
        while not parts.take_turn():
            pass

    def fired(self, count: int) -> None:
        self._fired += count

    def filtered(self, count: int, undecided: int = 0) -> None:
        with self._lock:
            self._filtered += count
            self._undecided += undecided

    def lost(self, stage: LossStage, count: int) -> None:
        with self._lock:
            self._lost[stage] += count
        self._on_loss()

    def spanned(self, counts: SpanCounts) -> None:
        with self._lock:
            self._spans += counts

    def losses(self) -> dict[LossStage, int]:
        """Return how many events were lost so far, by stage."""
        in_log = self._log.counts().lost
        return {**self._lost, LossStage.QUEUE: self._lost[LossStage.QUEUE] + in_log}

    def account(self, sites: int, snapshot: Snapshot | None = None) -> Account:
        """Return the account as of now. Events in the kernel are included as of the last report of the engine.

        snapshot: what is in rows, if not as of now.
        """
        rows = snapshot or (self._aggregator.table if self._aggregator else None)
        aggregated, valueless = (rows.hits, rows.valueless) if rows else (0, 0)
        counts = self._log.counts()
        spans = self._spans.settled()
        with self._lock:
            filtered, undecided = self._filtered, self._undecided
        accounted = counts.received + aggregated + filtered + sum(self._lost.values()) + spans.consumed
        return Account(
            delivered=counts.delivered,
            aggregated=aggregated,
            filtered=filtered,
            lost_kernel_buffer=self._lost[LossStage.KERNEL_BUFFER],
            lost_queue=counts.lost + self._lost[LossStage.QUEUE],
            lost_decode=self._lost[LossStage.DECODE],
            lost_quota=self._lost[LossStage.QUOTA],
            lost_table_full=self._lost[LossStage.TABLE_FULL],
            lost_missed=self._lost[LossStage.MISSED],
            lost_filter=self._lost[LossStage.FILTER],
            undecided=undecided,
            valueless=valueless,
            in_flight=counts.pending + max(self._fired - accounted, 0),
            sites=sites,
            spans=spans,
        )
