"""Events as a table, in the one form that they have between a ring and the wire.

                 time_ns  pid   tid   cpu  comm    site_id │ tables[0]        tables[1]
    event 0      …        4711  4711  0    firing  1       │ 17  "SELECT 1"
    event 1      …        4711  4712  1    firing  2       │                  -5
    event 2      …        4711  4711  0    firing  1       │ 18  "SELECT 2"

Every event has the columns on the left. Values have the types that their probe gives them, so that events whose values
have the same types share a table of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stapsdtd.events.columns import I32, I64, U16, U32, Comms, Indices, ValueColumn, concatenate

_FIXED_BYTES = 8 + 4 + 4 + 2 + 16 + 4


@dataclass(frozen=True, slots=True)
class ValueTable:
    """The values of those events of a batch whose values have the same types.

    rows: the events' positions in the batch, in rising order; None if these are all events.
    """

    columns: tuple[ValueColumn, ...]
    rows: Indices | None = None

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(column.layout for column in self.columns)

    def positions(self, count: int) -> Indices:
        """Return rows. count: of the batch's events."""
        return np.arange(count) if self.rows is None else self.rows


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in columns, and their values in tables. Each event is in one table, and each table has another layout.

    time_ns is CLOCK_MONOTONIC at the hit; pid and tid are of the daemon's pid namespace; comm is NUL-padded.
    """

    time_ns: I64
    pid: I32
    tid: I32
    cpu: U16
    comm: Comms
    site_id: U32
    tables: tuple[ValueTable, ...]

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def nbytes(self) -> int:
        """The memory that the columns take, approximately."""
        nbytes = _FIXED_BYTES * len(self.time_ns)
        for table in self.tables:
            if table.rows is not None:
                nbytes += table.rows.nbytes
            for column in table.columns:
                nbytes += column.nbytes
        return nbytes

    def row_bytes(self) -> Indices:
        """Return each event's share of nbytes."""
        sizes = np.full(len(self), _FIXED_BYTES, np.intp)
        for table in self.tables:
            rows = table.positions(len(self))
            sizes[rows] += 0 if table.rows is None else rows.itemsize
            for column in table.columns:
                sizes[rows] += column.row_bytes()
        return sizes

    def site_ids(self) -> list[int]:
        """Return the ids of the sites that fired, each once."""
        ids = self.site_id
        if len(ids) and not np.count_nonzero(ids != ids[0]):
            return [int(ids[0])]
        distinct: list[int] = np.unique(ids).tolist()
        return distinct

    def slice(self, begin: int, end: int) -> EventBatch:
        """Return consecutive events. Numbers share this batch's memory."""
        if end - begin == len(self):
            return self
        return EventBatch(
            self.time_ns[begin:end], self.pid[begin:end], self.tid[begin:end], self.cpu[begin:end],
            self.comm[begin:end], self.site_id[begin:end],
            _normalized(_slice(table, begin, end) for table in self.tables),
        )  # fmt: skip

    def take(self, rows: Indices) -> EventBatch:
        """Return copies of events, in the order given."""
        return EventBatch(
            self.time_ns[rows], self.pid[rows], self.tid[rows], self.cpu[rows], self.comm[rows], self.site_id[rows],
            _normalized(_take(table, rows, len(self)) for table in self.tables),
        )  # fmt: skip

    def homogeneous(self) -> Iterator[tuple[Indices, EventBatch]]:
        """Yield the events of each table, as a batch of one table, with their positions in this batch."""
        if len(self.tables) == 1:
            yield np.arange(len(self)), self
            return
        for table in self.tables:
            rows = table.positions(len(self))
            yield rows, EventBatch(
                self.time_ns[rows], self.pid[rows], self.tid[rows], self.cpu[rows], self.comm[rows],
                self.site_id[rows], (ValueTable(table.columns),),
            )  # fmt: skip

    def by_site(self) -> Iterator[tuple[int, Indices, EventBatch]]:
        """Yield each site's id and events, as batches of one table, with their positions in this batch."""
        for positions, same in self.homogeneous():
            site_ids = same.site_ids()
            if len(site_ids) == 1:
                yield site_ids[0], positions, same
                continue
            for site_id in site_ids:
                rows = np.flatnonzero(same.site_id == site_id)
                yield site_id, positions[rows], same.take(rows)


def merge(batches: Sequence[EventBatch]) -> EventBatch:
    """Join one or more batches and sort the events by time. Events with equal times keep their order."""
    batch = batches[0] if len(batches) == 1 else join(batches)
    times = batch.time_ns
    if np.count_nonzero(times[1:] < times[:-1]):
        return batch.take(np.argsort(times, kind="stable"))
    return batch


def join(batches: Sequence[EventBatch]) -> EventBatch:
    """Return all events of a batch after those of the batch before."""
    tables: list[ValueTable] = []
    begin = 0
    for batch in batches:
        tables += (ValueTable(table.columns, table.positions(len(batch)) + begin) for table in batch.tables)
        begin += len(batch)
    return EventBatch(
        np.concatenate([batch.time_ns for batch in batches]),
        np.concatenate([batch.pid for batch in batches]),
        np.concatenate([batch.tid for batch in batches]),
        np.concatenate([batch.cpu for batch in batches]),
        np.concatenate([batch.comm for batch in batches]),
        np.concatenate([batch.site_id for batch in batches]),
        unite(tables),
    )


def unite(tables: Iterable[ValueTable]) -> tuple[ValueTable, ...]:
    """Return one table for each layout. No event is in two of the tables."""
    by_layout: dict[tuple[str, ...], list[ValueTable]] = {}
    for table in tables:
        by_layout.setdefault(table.layout, []).append(table)
    return _normalized(map(_unite, by_layout.values()))


def _unite(tables: Sequence[ValueTable]) -> ValueTable:
    """All of one layout, and none for all events unless it is the only one."""
    rows = [table.rows for table in tables if table.rows is not None]
    if len(tables) == 1 or not rows:
        return tables[0]
    columns = tuple(map(concatenate, zip(*(table.columns for table in tables), strict=True)))
    joined = np.concatenate(rows)
    if _is_rising(joined):
        return ValueTable(columns, joined)
    order = np.argsort(joined, kind="stable")
    return ValueTable(tuple(column.take(order) for column in columns), joined[order])


def _normalized(tables: Iterable[ValueTable]) -> tuple[ValueTable, ...]:
    """Leave out tables without events. The only one left has all."""
    filled = tuple(table for table in tables if table.rows is None or len(table.rows))
    return (ValueTable(filled[0].columns),) if len(filled) == 1 else filled


def _slice(table: ValueTable, begin: int, end: int) -> ValueTable:
    if table.rows is None:
        return ValueTable(tuple(column.slice(begin, end) for column in table.columns))
    first, last = np.searchsorted(table.rows, (begin, end)).tolist()
    return ValueTable(tuple(column.slice(first, last) for column in table.columns), table.rows[first:last] - begin)


def _take(table: ValueTable, rows: Indices, count: int) -> ValueTable:
    """count: of the events of the batch that the table belongs to."""
    if table.rows is None:
        return ValueTable(tuple(column.take(rows) for column in table.columns))
    positions = np.full(count, -1)
    positions[table.rows] = np.arange(len(table.rows))
    taken = positions[rows]
    kept = np.flatnonzero(taken >= 0)
    taken = taken[kept]
    if len(taken) == len(table.rows) and _is_rising(taken):
        return ValueTable(table.columns, kept)
    return ValueTable(tuple(column.take(taken) for column in table.columns), kept)


def _is_rising(rows: Indices) -> bool:
    return bool((rows[1:] > rows[:-1]).all())
