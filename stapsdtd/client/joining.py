"""Rows and snapshots of the same aggregation, added up: exactly, but for the rounding of averages and deviations."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd.client.snapshots import Bucket, Snapshot, SnapshotRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stapsdtd.client.messages import Value


def joined(before: Snapshot, after: Snapshot) -> Snapshot:
    """Return what two cumulative snapshots come to together, the later one of a new subscription.

    Its time is that of both, without what was between them.
    """
    by_key: dict[tuple[tuple[type, Value], ...], list[SnapshotRow]] = {}
    for row in (*before.rows, *after.rows):
        by_key.setdefault(tuple((type(part), part) for part in row.key), []).append(row)
    end_ns, took_ns = after.end_monotonic_ns, before.duration_ns + after.duration_ns
    return replace(
        continued(before, after),
        begin_ns=before.begin_ns,
        begin_monotonic_ns=None if end_ns is None else end_ns - took_ns,
        rows=tuple(rows[0] if len(rows) == 1 else joined_row(rows[0].key, rows) for rows in by_key.values()),
    )


def continued(before: Snapshot, after: Snapshot) -> Snapshot:
    """Return a snapshot of a new subscription as one that follows the last one of the subscription before."""
    return replace(after, number=before.number + after.number, account=before.account + after.account)


def joined_row(key: tuple[Value, ...], rows: Sequence[SnapshotRow]) -> SnapshotRow:
    """Return the row of rows that have the functions of `to_join`."""
    counts: Counter[tuple[int | None, int | None]] = Counter()
    for row in rows:
        for bucket in row.buckets:
            counts[bucket.low, bucket.high] += bucket.count
    values = {name: _JOINED[name](name, rows) for name in rows[0].values}
    buckets = tuple(Bucket(*bounds, counts[bounds]) for bounds in sorted(counts, key=_begin))
    return SnapshotRow(key, values, buckets)


def without(rows: Iterable[SnapshotRow], functions: Sequence[str]) -> tuple[SnapshotRow, ...]:
    """Return the rows with these functions alone."""
    names = {each.partition("(")[0].strip() for each in functions}
    return tuple(
        replace(row, values={name: value for name, value in row.values.items() if name in names}) for row in rows
    )


def _begin(bounds: tuple[int | None, int | None]) -> float:
    return -math.inf if bounds[0] is None else bounds[0]


def _known(name: str, rows: Iterable[SnapshotRow]) -> list[int | float]:
    return [value for row in rows if (value := row.values[name]) is not None]


def _count(name: str, rows: Sequence[SnapshotRow]) -> int | float:
    return sum(_known(name, rows))


def _sum(name: str, rows: Sequence[SnapshotRow]) -> int | float | None:
    known = _known(name, rows)
    return sum(known) if known else None


def _average(name: str, rows: Sequence[SnapshotRow]) -> float | None:
    del name
    values = _count("values", rows)
    return _count("sum", rows) / values if values else None


def _deviation(name: str, rows: Sequence[SnapshotRow]) -> float | None:
    average = _average("avg", rows)
    if average is None:
        return None
    squares = 0.0
    for row in rows:
        deviation, own = row.values[name], row.values["avg"]
        if deviation is not None and own is not None:
            squares += (row.values["values"] or 0) * (deviation**2 + (own - average) ** 2)
    return math.sqrt(squares / _count("values", rows))


_JOINED: Mapping[str, Callable[[str, Sequence[SnapshotRow]], int | float | None]] = {
    "count": _count,
    "values": _count,
    "sum": _sum,
    "min": lambda name, rows: min(_known(name, rows), default=None),
    "max": lambda name, rows: max(_known(name, rows), default=None),
    "avg": _average,
    "stddev": _deviation,
}
