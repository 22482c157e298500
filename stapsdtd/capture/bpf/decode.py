"""Records into event batches, one per subscription.

    ring ──view──► records ──by plan──► rows of each subscription ──gather──► EventBatch

One record serves all subscriptions whose filters its hit passed. Columns that several of them want are gathered once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stapsdtd.capture.bpf.cgroup_names import CgroupNames
from stapsdtd.capture.bpf.column_reader import ColumnReader, Rows
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Reading
from stapsdtd.capture.bpf.rings import DISCARDED, Records
from stapsdtd.capture.bpf.sources import Layout
from stapsdtd.capture.bpf.tables import Generation
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.batch import EventBatch, ValueTable, unite
from stapsdtd.events.columns import I32, I64, U16, U64, Comms, Indices, ValueColumn


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


class RecordDecoder:
    """Reads the records of one ring, which must not be consumed before `events` returned."""

    def __init__(self, records: Records, raw: memoryview, stride: int, cgroups: CgroupNames) -> None:
        """raw: the memory from the first record on."""
        self._records = records
        self._reader = ColumnReader(records, raw, stride, cgroups)
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

    def events(
        self, plans: Mapping[Generation, ActivePlan], sheds: Callable[[Channel], bool] = lambda _: False
    ) -> tuple[list[tuple[Channel, EventBatch]], int]:
        """Return each subscription's events in the order of the ring, and how many records are of unknown plans.

        sheds: tells of a subscription whether its events are lost, counted, without being decoded.
        """
        self._reader.use(plans)
        wanted: dict[Channel, list[tuple[Reading, _Selection]]] = {}
        received: list[tuple[ActivePlan, int, int]] = []
        shed: Counter[Channel] = Counter()
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
                    if reading.bit != bit:
                        continue
                    if sheds(reading.channel):
                        shed[reading.channel] += accepted.count
                    else:
                        wanted.setdefault(reading.channel, []).append((reading, accepted))
        batches = [(channel, self._batch(parts)) for channel, parts in wanted.items()]
        for plan, bit, count in received:
            plan.received[bit] = plan.received.get(bit, 0) + count
        for channel, count in shed.items():
            channel.lost(LossStage.QUOTA, count)
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
        """rows: of the whole batch; part_of: which of the parts each is from."""
        by_layout: dict[Layout, list[int]] = {}
        for number, (reading, _) in enumerate(parts):
            by_layout.setdefault(reading.layout, []).append(number)
        if len(by_layout) == 1:
            selections = tuple(selection for _, selection in parts)
            return tuple(ValueTable(self._columns_of(layout, selections, rows)) for layout in by_layout)
        tables = []
        for layout, numbers in by_layout.items():
            is_member = np.zeros(len(parts), np.bool_)
            is_member[numbers] = True
            members = np.flatnonzero(is_member[part_of])
            selections = tuple(parts[number][1] for number in numbers)
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
