"""Records into event batches, one per subscription.

    ring ──view──► records ──by plan──► rows of each subscription ──gather──► EventBatch

One record serves all subscriptions whose filters its hit passed. Columns that several of them want are gathered once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf.layout import RECORD_HEADER
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Fixed, Layout, NoText, NumberAt, Reading, Source, TextAt
from stapsdtd.capture.bpf.rings import DISCARDED, Records
from stapsdtd.capture.bpf.tables import Generation
from stapsdtd.capture.bpf.unread import Unread
from stapsdtd.events.batch import EventBatch, ValueTable, unite
from stapsdtd.events.columns import (
    I32,
    I64,
    U16,
    U64,
    Bools,
    Comms,
    Indices,
    Numbers,
    Strings,
    ValueColumn,
    floats,
)

Rows = Indices | None
"""Records of a ring by their positions, in rising order; None is all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Selection:
    """Records that a filter accepted. Compared by identity, so that what was gathered of them is found again."""

    rows: Rows
    count: int

    def positions(self) -> Indices:
        return np.arange(self.count) if self.rows is None else self.rows


@dataclass(frozen=True, slots=True)
class _Head:
    """The columns that every event has, but for site_id."""

    time_ns: I64
    pid: I32
    tid: I32
    cpu: U16
    comm: Comms


class _ColumnReader:
    """Makes columns of records. rows: which records.

    from_file, unavailable: how many values that hits could not read were found in files, and how many were not.
    """

    def __init__(self, records: Records, raw: memoryview, stride: int) -> None:
        self._records = records
        self._values_of_records: U64 = records["values"]
        self._raw = raw
        self._stride = stride
        # on small arrays several times as fast as any()
        self._some_missing = np.count_nonzero(records["missing"]) > 0
        self._unread = Unread(records, {})
        self.from_file = self.unavailable = 0

    def use(self, plans: Mapping[Generation, ActivePlan]) -> None:
        """Take values that hits could not read from the files of these plans."""
        if self._some_missing:
            self._unread = Unread(self._records, plans)

    def unread(self) -> Iterator[tuple[int, int, int]]:
        return self._unread.places() if self._some_missing else iter(())

    def gather(self, name: str, rows: Rows) -> npt.NDArray[Any]:
        """Copy a field out of the ring."""
        column = self._records[name]
        return column.copy() if rows is None else column[rows]

    def _values(self, position: int, rows: Rows) -> U64:
        values = self._values_of_records[:, position]
        return values.copy() if rows is None else values[rows]

    def _missing(self, position: int, rows: Rows) -> Bools | None:
        if not self._some_missing:
            return None
        missing = (self.gather("missing", rows) >> np.uint64(position) & np.uint64(1)).astype(np.bool_)
        return missing if missing.any() else None

    def column(self, source: Source, rows: Rows) -> ValueColumn:
        count = len(self._records) if rows is None else len(rows)
        match source:
            case NumberAt(position, is_signed, float_bytes):
                numbers, missing = self._values(position, rows), self._missing(position, rows)
                if missing is not None:
                    before = missing.copy()
                    self._unread.fill_numbers(numbers, missing, position, rows)
                    self._count(before, missing)
                if float_bytes:
                    return Numbers(floats(numbers, float_bytes), missing)
                return Numbers(numbers.view(np.int64) if is_signed else numbers, missing)
            case TextAt():
                return self._texts(rows, source)
            case Fixed(value, is_signed, is_float):
                missing = np.ones(count, np.bool_) if value is None else None
                if is_float:
                    return Numbers(np.zeros(count, np.float64), missing)
                bits = np.full(count, (value or 0) % (1 << 64), np.uint64)
                return Numbers(bits.view(np.int64) if is_signed else bits, missing)
            case NoText():
                return Strings.of([None] * count)

    def _texts(self, rows: Rows, source: TextAt) -> Strings:
        offsets, missing = self._values(source.position, rows), self._missing(source.position, rows)
        constants = {}
        if missing is not None:
            constants = self._unread.texts(offsets, missing, source, rows)
            offsets[missing] = 0
        lengths = np.minimum(offsets >> np.uint64(32), np.uint64(source.max_bytes)).astype(np.intp)
        firsts = (np.arange(len(offsets)) if rows is None else rows) * self._stride + RECORD_HEADER
        begins = firsts + (offsets & np.uint64(0xFFFFFFFF)).astype(np.intp)
        raw = self._raw
        texts: list[bytes | memoryview] = [
            raw[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
        ]
        for row, text in constants.items():
            texts[row] = text
            lengths[row] = len(text)
        if missing is not None:
            before = missing.copy()
            missing[list(constants)] = False
            self._count(before, missing)
        return Strings(np.cumsum(lengths, dtype=np.uint32), b"".join(texts), missing, source.is_raw)

    def _count(self, before: Bools, missing: Bools) -> None:
        left = int(np.count_nonzero(missing))
        self.from_file += int(np.count_nonzero(before)) - left
        self.unavailable += left


class RecordDecoder:
    """Reads the records of one ring, which must not be consumed before `events` returned."""

    def __init__(self, records: Records, raw: memoryview, stride: int) -> None:
        """raw: the memory from the first record on."""
        self._records = records
        self._reader = _ColumnReader(records, raw, stride)
        self._heads: dict[tuple[_Selection, ...], _Head] = {}
        self._columns: dict[tuple[Layout, tuple[_Selection, ...]], tuple[ValueColumn, ...]] = {}

    @property
    def from_file(self) -> int:
        """How many values that hits could not read were found in files; known when `events` returned."""
        return self._reader.from_file

    @property
    def unavailable(self) -> int:
        """How many values that hits could not read were found nowhere; known when `events` returned."""
        return self._reader.unavailable

    def events(self, plans: Mapping[Generation, ActivePlan]) -> tuple[list[tuple[Channel, EventBatch]], int]:
        """Return each subscription's events in the order of the ring, and how many records are of unknown plans."""
        self._reader.use(plans)
        wanted: dict[Channel, list[tuple[Reading, _Selection]]] = {}
        received: list[tuple[ActivePlan, int, int]] = []
        unknown = 0
        for generation, selection in self._by_plan():
            if not generation:
                continue
            plan = plans.get(generation)
            if plan is None:
                unknown += selection.count
                continue
            for bit, accepted in self._by_filter(plan, selection):
                received.append((plan, bit, accepted.count))
                for reading in plan.readings:
                    if reading.bit == bit:
                        wanted.setdefault(reading.channel, []).append((reading, accepted))
        batches = [(channel, self._batch(parts)) for channel, parts in wanted.items()]
        for plan, bit, count in received:
            plan.received[bit] = plan.received.get(bit, 0) + count
        return batches, unknown

    def unread(self) -> Iterator[tuple[int, int, int]]:
        """As `Unread.places`, once `events` returned."""
        return self._reader.unread()

    def _by_plan(self) -> list[tuple[Generation, _Selection]]:
        """Split the records by generation. Discarded ones have generation 0."""
        generations: U64 = self._records["generation"]
        discarded = self._records["length"] & DISCARDED
        if np.count_nonzero(discarded):
            generations = np.where(discarded, np.uint64(0), generations)
        if not np.count_nonzero(generations != generations[0]):
            return [(int(generations[0]), _Selection(None, len(generations)))]
        # by the low 16 bits, which are the plan's id: numpy sorts 16 bits in linear time
        order = np.argsort(generations.astype(np.uint16), kind="stable")
        in_order = generations[order]
        begins = np.concatenate([[0], np.flatnonzero(np.diff(in_order)) + 1, [len(order)]]).tolist()
        return [(int(in_order[begin]), _Selection(order[begin:end], end - begin)) for begin, end in pairwise(begins)]

    def _by_filter(self, plan: ActivePlan, selection: _Selection) -> list[tuple[int, _Selection]]:
        """Return the records that each filter whose events are wanted accepted, by the filter's bit."""
        matched: U64 | None = None
        accepted: list[tuple[int, _Selection]] = []
        for bit in dict.fromkeys(reading.bit for reading in plan.readings):
            if not plan.tested >> bit & 1:
                accepted.append((bit, selection))
                continue
            rows = selection.rows
            if matched is None:
                matched = self._records["matched"] if rows is None else self._records["matched"][rows]
            has = (matched >> np.uint64(bit) & np.uint64(1)).astype(np.bool_)
            count = int(np.count_nonzero(has))
            if count == selection.count:
                accepted.append((bit, selection))
            elif count:
                accepted.append((bit, _Selection(np.flatnonzero(has) if rows is None else rows[has], count)))
        return accepted

    def _batch(self, parts: Sequence[tuple[Reading, _Selection]]) -> EventBatch:
        """Gather one subscription's events."""
        selections = tuple(selection for _, selection in parts)
        if len(parts) == 1:
            ((reading, selection),) = parts
            rows = selection.rows
            site_ids = np.full(selection.count, reading.site_id, np.uint32)
            tables: tuple[ValueTable, ...] = (ValueTable(self._columns_of(reading.layout, selections, rows)),)
        else:
            rows = np.concatenate([selection.positions() for selection in selections])
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            part_of = np.repeat(np.arange(len(parts)), [selection.count for selection in selections])[order]
            site_ids = np.array([reading.site_id for reading, _ in parts], np.uint32)[part_of]
            tables = self._tables_of(parts, rows, part_of)
        head = self._heads.get(selections) or self._heads.setdefault(selections, self._head(rows))
        return EventBatch(head.time_ns, head.pid, head.tid, head.cpu, head.comm, site_ids, tables)

    def _tables_of(
        self, parts: Sequence[tuple[Reading, _Selection]], rows: Indices, part_of: Indices
    ) -> tuple[ValueTable, ...]:
        """rows: of the whole batch, of which each is of one of the parts."""
        by_layout: dict[Layout, list[int]] = {}
        for number, (reading, _) in enumerate(parts):
            by_layout.setdefault(reading.layout, []).append(number)
        if len(by_layout) == 1:
            selections = tuple(selection for _, selection in parts)
            return tuple(ValueTable(self._columns_of(layout, selections, rows)) for layout in by_layout)
        tables = []
        for layout, numbers in by_layout.items():
            selections = tuple(parts[number][1] for number in numbers)
            members = np.flatnonzero(np.isin(part_of, numbers))
            tables.append(ValueTable(self._columns_of(layout, selections, rows[members]), members))
        return unite(tables)

    def _head(self, rows: Rows) -> _Head:
        gather = self._reader.gather
        return _Head(
            gather("time_ns", rows).view(np.int64),
            gather("pid", rows).view(np.int32),
            gather("tid", rows).view(np.int32),
            gather("cpu", rows).astype(np.uint16),
            gather("comm", rows),
        )

    def _columns_of(self, layout: Layout, selections: tuple[_Selection, ...], rows: Rows) -> tuple[ValueColumn, ...]:
        """rows: of all the selections together."""
        columns = self._columns.get((layout, selections))
        if columns is None:
            columns = tuple(self._reader.column(source, rows) for source in layout)
            self._columns[layout, selections] = columns
        return columns
