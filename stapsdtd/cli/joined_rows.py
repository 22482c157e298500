"""Rows of a snapshot whose keys are the same once SQL has lost its literals, added up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd.cli.sql_text import normalized
from stapsdtd.client import Bucket, CutText, SnapshotRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stapsdtd.client import Snapshot, Value

_COUNT = "values"
"""The function that says how many values an average is of."""


def to_join(functions: Sequence[str]) -> Sequence[str]:
    """Return the functions to ask for so that rows can be joined: an average alone does not say what it weighs."""
    return (*functions, _COUNT) if "avg" in functions else functions


def without_literals(snapshot: Snapshot, dialect: str) -> Snapshot:
    """Return a snapshot of the functions that were to be joined, whose keys' strings are SQL without literals.

    Statements that were cut are not joined with those that were not.
    """
    by_key: dict[tuple[tuple[type, Value], ...], list[SnapshotRow]] = {}
    for row in snapshot.rows:
        key = tuple(_without_literals(part, dialect) for part in row.key)
        by_key.setdefault(tuple((type(part), part) for part in key), []).append(row)
    return replace(snapshot, rows=tuple(_joined(tuple(part for _, part in key), rows) for key, rows in by_key.items()))


def _without_literals(part: Value, dialect: str) -> Value:
    if not isinstance(part, str):
        return part
    text = normalized(part, dialect)
    return CutText(text) if isinstance(part, CutText) else text


def _joined(key: tuple[Value, ...], rows: Sequence[SnapshotRow]) -> SnapshotRow:
    counts: Counter[tuple[int | None, int | None]] = Counter()
    for row in rows:
        for bucket in row.buckets:
            counts[bucket.low, bucket.high] += bucket.count
    values = {
        name: _average(rows) if name == "avg" else _ADDED[name](_known(name, rows))
        for name in rows[0].values
        if name != _COUNT
    }
    buckets = tuple(Bucket(*bounds, counts[bounds]) for bounds in sorted(counts, key=_begin))
    return SnapshotRow(key, values, buckets)


def _known(name: str, rows: Sequence[SnapshotRow]) -> list[int | float]:
    return [value for row in rows if (value := row.values[name]) is not None]


def _average(rows: Sequence[SnapshotRow]) -> float | None:
    values = sum(_known(_COUNT, rows))
    return sum(_known("sum", rows)) / values if values else None


def _begin(bounds: tuple[int | None, int | None]) -> float:
    return -math.inf if bounds[0] is None else bounds[0]


_ADDED: Mapping[str, Callable[[Sequence[int | float]], int | float | None]] = {
    "count": sum,
    "sum": lambda values: sum(values) if values else None,
    "min": lambda values: min(values, default=None),
    "max": lambda values: max(values, default=None),
}
