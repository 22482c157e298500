"""Rows of a snapshot whose keys are the same once SQL has lost its literals, added up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd.cli.sql_text import normalized
from stapsdtd.client import Bucket, SnapshotRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stapsdtd.client import Snapshot, Value


def without_literals(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose keys' strings are SQL without literals."""
    by_key: dict[tuple[Value, ...], list[SnapshotRow]] = {}
    for row in snapshot.rows:
        key = tuple(normalized(part) if isinstance(part, str) else part for part in row.key)
        by_key.setdefault(key, []).append(row)
    return replace(snapshot, rows=tuple(_joined(key, rows) for key, rows in by_key.items()))


def _joined(key: tuple[Value, ...], rows: Sequence[SnapshotRow]) -> SnapshotRow:
    if len(rows) == 1:
        return replace(rows[0], key=key)
    counts: Counter[tuple[int | None, int | None]] = Counter()
    for row in rows:
        for bucket in row.buckets:
            counts[bucket.low, bucket.high] += bucket.count
    values = {name: _average(rows) if name == "avg" else _ADDED[name](_known(name, rows)) for name in rows[0].values}
    buckets = tuple(Bucket(*bounds, counts[bounds]) for bounds in sorted(counts, key=_begin))
    return SnapshotRow(key, values, buckets)


def _known(name: str, rows: Sequence[SnapshotRow]) -> list[int | float]:
    return [value for row in rows if (value := row.values[name]) is not None]


def _average(rows: Sequence[SnapshotRow]) -> float | None:
    """Return the average of all values. How many a row has follows from its sum: hits without one are in the count."""
    with_values = [row for row in rows if row.values["avg"] is not None]
    values = sum(_values(row) for row in with_values)
    return sum(_known("sum", with_values)) / values if values else None


def _values(row: SnapshotRow) -> float:
    average = row.values["avg"]
    return round((row.values["sum"] or 0) / average) if average else row.values["count"] or 0


def _begin(bounds: tuple[int | None, int | None]) -> float:
    return -math.inf if bounds[0] is None else bounds[0]


_ADDED: Mapping[str, Callable[[Sequence[int | float]], int | float | None]] = {
    "count": sum,
    "sum": lambda values: sum(values) if values else None,
    "min": lambda values: min(values, default=None),
    "max": lambda values: max(values, default=None),
}
