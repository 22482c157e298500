"""What the program counts at each hit, reported to the subscriptions concerned."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import numpy as np

from stapsdtd.aggregate.aggregation import Row
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.layout import Counter, SpanCounter
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.columns import U64, Indices
from stapsdtd.spans.span import SpanCounts

_log = logging.getLogger(__name__)
_REPORT_NS = 200_000_000
_HITS = SpanCounter.STARTS, SpanCounter.PAIRED, SpanCounter.UNMATCHED, SpanCounter.LOST
"""Of which each hit is counted as one."""


class CounterReader:
    """Reads the kernel's counters a few times a second. Used by the reader thread only."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._by_cell: dict[int, list[_Counters]] = {}
        self._totals: U64 = np.zeros(layout.MAX_COUNTERS, np.uint64)
        self._starts: dict[ActivePlan, list[int]] = {}
        self._single: set[int] = set()
        self._single_cells: Indices | None = None
        self._reported_ns = 0

    def begin(self, plan: ActivePlan) -> None:
        if plan.paired:
            pairings = range(len(plan.paired))
            self._starts[plan] = [plan.entry.pairing_cell(SpanCounter.STARTS, pairing) for pairing in pairings]
        if plan.entry.is_single:
            self._single.add(plan.entry.cell(Counter.HITS))
            self._single_cells = None
        for counters in _counters_of(plan):
            for cell in counters.cells:
                self._by_cell.setdefault(cell, []).append(counters)
                # another plan may have used the cell before
                self._totals[cell] = 0

    def end(self, plan: ActivePlan) -> None:
        self._starts.pop(plan, None)
        if plan.entry.is_single:
            self._single.discard(plan.entry.cell(Counter.HITS))
            self._single_cells = None
        for counters in _counters_of(plan):
            for cell in counters.cells:
                self._by_cell.pop(cell, None)

    def report_if_due(self) -> None:
        now = time.monotonic_ns()
        if now - self._reported_ns > _REPORT_NS:
            self._reported_ns = now
            self.report()

    def report(self) -> U64:
        """Tell each subscription what fired, was filtered and was lost since the last report; return all totals."""
        totals = self._tables.totals()
        # after what became of them: none is to seem to have ended before it began
        if starts := [cell for cells in self._starts.values() for cell in cells]:
            totals[starts] = self._tables.sums(starts)
        for plan in self._starts:
            if plan.is_paired:
                totals[plan.entry.cell(Counter.HITS)] += sum(totals[plan.entry.pairing_cell(each, 0)] for each in _HITS)
        if self._single_cells is None:
            self._single_cells = np.fromiter(self._single, np.intp, len(self._single))
        hits = self._single_cells
        totals[hits] += totals[hits + Counter.FILTERED] + totals[hits + Counter.EXCLUDED]
        before = self._totals[: len(totals)]
        changed = np.flatnonzero(totals != before).tolist()
        before[:] = totals
        for counters in {counters for cell in changed for counters in self._by_cell.get(cell, ())}:
            counters.report(totals)
        return totals


class _Counters(Protocol):
    """Counters that are reported together."""

    @property
    def cells(self) -> list[int]: ...

    def report(self, totals: U64) -> None: ...


class _FilterCounters:
    """The kernel's counters of one filter, and how much of them was reported."""

    def __init__(self, plan: ActivePlan, bit: int) -> None:
        self._entry = plan.entry
        self._bit = bit
        self._channels = [channel for filter_bit, channel in plan.channels if filter_bit == bit]
        self._emitting = [reading.channel for reading in plan.readings if reading.bit == bit]
        self._counting = [counted for counted in plan.counted if counted.bit == bit]
        self._fired = self._filtered = self._lost = self._undecided = self._accepted = 0

    @property
    def cells(self) -> list[int]:
        of_filter = [Counter.FILTERED, Counter.EXCLUDED, Counter.LOST]
        if self._entry.counts_undecided:
            of_filter.append(Counter.UNDECIDED)
        return [self._entry.cell(Counter.HITS), *(self._entry.cell(counter, self._bit) for counter in of_filter)]

    def report(self, totals: U64) -> None:
        hits, filtered, excluded, lost, *more = totals[self.cells].tolist()
        # of a hit in progress, this is counted first
        undecided = min(sum(more), filtered)
        # a hit in progress may have been counted as excluded, and not yet as a hit
        fired = hits - excluded
        for channel in self._channels:
            if fired > self._fired:
                channel.fired(fired - self._fired)
            if filtered > self._filtered:
                channel.filtered(filtered - self._filtered, undecided - self._undecided)
        if lost > self._lost:
            for channel in self._emitting:
                channel.lost(LossStage.KERNEL_BUFFER, lost - self._lost)
        # the same may be true of what was filtered
        accepted = fired - filtered
        if accepted > self._accepted:
            for counted in self._counting:
                counted.channel.aggregated(counted.site_id, {counted.key: Row(accepted - self._accepted)})
        self._fired, self._filtered, self._lost = max(fired, self._fired), filtered, lost
        self._undecided = undecided
        self._accepted = max(accepted, self._accepted)


class _RecipeCounter:
    """The counter of hits for which a table had no room."""

    def __init__(self, plan: ActivePlan, recipe: int) -> None:
        self._cell = plan.entry.lost_by(recipe)
        self._channel = plan.added[recipe].channel
        self._lost = 0

    @property
    def cells(self) -> list[int]:
        return [self._cell]

    def report(self, totals: U64) -> None:
        lost = int(totals[self._cell])
        if lost > self._lost:
            self._channel.lost(LossStage.TABLE_FULL, lost - self._lost)
        self._lost = lost


class _PairingCounters:
    """What became of starts, or of ends, of one subscription at a site."""

    def __init__(self, plan: ActivePlan, pairing: int) -> None:
        self._paired = plan.paired[pairing]
        self._cells = {counter: plan.entry.pairing_cell(counter, pairing) for counter in SpanCounter}
        self._told = dict.fromkeys(SpanCounter, 0)

    @property
    def cells(self) -> list[int]:
        return list(self._cells.values())

    def report(self, totals: U64) -> None:
        found = {counter: int(totals[cell]) for counter, cell in self._cells.items()}
        more = {counter: found[counter] - told for counter, told in self._told.items()}
        self._told = found
        channel = self._paired.channel
        if lost := more.pop(SpanCounter.LOST):
            channel.lost(LossStage.DECODE, lost)
        if any(more.values()):
            channel.spanned(SpanCounts(**{counter.name.lower(): count for counter, count in more.items()}))
        if (counted := self._paired.counted) and (pairs := more[SpanCounter.PAIRED]):
            channel.aggregated(counted.site_id, {counted.key: Row(pairs)})


def _counters_of(plan: ActivePlan) -> list[_Counters]:
    filters = [_FilterCounters(plan, bit) for bit in plan.entry.bits]
    recipes = (_RecipeCounter(plan, recipe) for recipe in range(len(plan.added)))
    return [*filters, *recipes, *(_PairingCounters(plan, pairing) for pairing in range(len(plan.paired)))]


def write_off(plan: ActivePlan, totals: U64) -> None:
    """Report what was counted as a hit of an ended plan and never read as lost."""
    for reading in plan.readings:
        if not reading.is_complete:
            continue
        unaccounted = _unaccounted(plan, reading.bit, totals)
        if unaccounted > 0:
            _log.error("%d events of a site were counted by the kernel and never read", unaccounted)
            reading.channel.lost(LossStage.DECODE, unaccounted)


def _unaccounted(plan: ActivePlan, bit: int, totals: U64) -> int:
    """Return how many of a filter's hits were neither read, filtered, excluded, lost nor ends without a start."""
    others = sum(
        int(totals[plan.entry.cell(counter, bit)]) for counter in (Counter.FILTERED, Counter.EXCLUDED, Counter.LOST)
    )
    others += sum(
        int(totals[plan.entry.pairing_cell(counter, pairing)])
        for pairing, paired in enumerate(plan.paired)
        if paired.bit == bit
        for counter in (SpanCounter.UNMATCHED, SpanCounter.LOST)
    )
    return int(totals[plan.entry.cell(Counter.HITS)]) - others - plan.received.get(bit, 0)
