"""Group a batch's events by key: for hits that the kernel does not aggregate itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stapsdtd.aggregate.aggregation import (
    SITE_FIELDS,
    Aggregation,
    Computed,
    HitField,
    Key,
    KeySource,
    KeyValue,
    Row,
)
from stapsdtd.aggregate.buckets import Integers
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import F64, I64, U64, Bools, Indices, Numbers, Strings, ValueColumn
from stapsdtd.model import Capture

SiteValue = Callable[[int, HitField], bytes]
"""Returns a property of the probe at a site, by the site's id."""


def group(aggregation: Aggregation, batch: EventBatch, site_value: SiteValue) -> dict[Key, Row]:
    """Return a row for each key among the events, whose values are those of `aggregation.columns`."""
    rows: dict[Key, Row] = {}
    for _, part in batch.homogeneous():
        for key, row in _group(aggregation, part, site_value).items():
            if key in rows:
                rows[key].add(row)
            else:
                rows[key] = row
    return rows


def _group(aggregation: Aggregation, batch: EventBatch, site_value: SiteValue) -> dict[Key, Row]:
    """Of a batch with one table."""
    columns = dict(zip(aggregation.columns, map(_without_nan, batch.tables[0].columns), strict=True))
    groups, keys = _groups([_coded(key, batch, columns, site_value) for key in aggregation.keys], len(batch))
    counts = np.bincount(groups, minlength=len(keys)).tolist()
    rows = [Row(count) for count in counts]
    if aggregation.value is not None:
        values = columns[aggregation.value]
        if isinstance(values, Numbers):
            _add_values(aggregation, rows, groups, values)
    return dict(zip(keys, rows, strict=True))


def _without_nan(column: ValueColumn) -> ValueColumn:
    """Mark what is no number as unavailable: it equals no other key, and no value could be compared with it."""
    if isinstance(column, Strings) or column.data.dtype.kind != "f":
        return column
    is_nan = np.isnan(column.data)
    if not is_nan.any():
        return column
    return Numbers(column.data, is_nan if column.unavailable is None else is_nan | column.unavailable)


Coded = tuple[Indices, list[KeyValue]]
"""For each event the position of its value among the distinct values."""


def _groups(parts: Sequence[Coded], count: int) -> tuple[Indices, list[Key]]:
    """Return the group of each event, and the key of each group."""
    groups = np.zeros(count, np.intp)
    # of each group, one of its events
    firsts = np.zeros(min(count, 1), np.intp)
    for codes, values in parts:
        _, firsts, groups = np.unique(groups * len(values) + codes, return_index=True, return_inverse=True)
    keys: list[Key] = list(
        zip(*([values[code] for code in codes[firsts].tolist()] for codes, values in parts), strict=True)
    )
    return groups, keys or [()] * len(firsts)


def _coded(
    key: KeySource | Computed,
    batch: EventBatch,
    columns: Mapping[Capture | Computed, ValueColumn],
    site_value: SiteValue,
) -> Coded:
    if not isinstance(key, HitField):
        column = columns[key]
        return _coded_texts(column.tolist()) if isinstance(column, Strings) else _coded_numbers(column)
    if key in SITE_FIELDS:
        ids, of_events = np.unique(batch.site_id, return_inverse=True)
        codes, values = _coded_texts([site_value(site_id, key) for site_id in ids.tolist()])
        return codes[of_events], values
    if key is HitField.EXECNAME:
        names, codes = np.unique(batch.comm, return_inverse=True)
        return codes, list(names.tolist())
    numbers = {HitField.PID: batch.pid, HitField.TID: batch.tid, HitField.CPU: batch.cpu.astype(np.int32)}[key]
    distinct, codes = np.unique(numbers, return_inverse=True)
    return codes, list(distinct.tolist())


def _coded_numbers(column: Numbers) -> Coded:
    distinct, codes = np.unique(column.data, return_inverse=True)
    return _with_unavailable(codes, list(distinct.tolist()), column.unavailable)


def _coded_texts(texts: Sequence[bytes | None]) -> Coded:
    positions: dict[KeyValue, int] = {}
    codes = np.fromiter((positions.setdefault(text, len(positions)) for text in texts), np.intp, len(texts))
    return codes, list(positions)


def _with_unavailable(codes: Indices, values: list[KeyValue], unavailable: Bools | None) -> Coded:
    if unavailable is None:
        return codes, values
    return np.where(unavailable, len(values), codes), [*values, None]


def _add_values(aggregation: Aggregation, rows: list[Row], groups: Indices, column: Numbers) -> None:
    """Add the values of events, whose groups are positions in rows."""
    values = column.data
    if column.unavailable is not None:
        groups, values = groups[~column.unavailable], values[~column.unavailable]
    order = np.argsort(groups, kind="stable")
    groups, values = groups[order], values[order]
    present, starts, counts = np.unique(groups, return_index=True, return_counts=True)
    if not len(present):
        return
    as_floats = values.astype(np.float64)
    means = np.add.reduceat(as_floats, starts) / counts
    differences = as_floats - np.repeat(means, counts)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.add.reduceat(differences * differences, starts)
    lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    totals = _totals(values, starts)
    for position, number in enumerate(present.tolist()):
        row = rows[number]
        row.values, row.total = int(counts[position]), totals[position]
        row.low, row.high = lows[position].item(), highs[position].item()
        row.mean, row.squares = float(means[position]), float(squares[position])
    if aggregation.buckets is not None:
        pairs = np.stack([groups, aggregation.buckets.numbers(_integers(values))])
        distinct, of_each = np.unique(pairs, axis=1, return_counts=True)
        for number, bucket, count in zip(*distinct.tolist(), of_each.tolist(), strict=True):
            rows[number].buckets[bucket] = count


def _totals(values: I64 | U64 | F64, starts: Indices) -> list[int] | list[float]:
    """Return the exact sums of integers: of their halves, since 64 bits might not hold them."""
    if values.dtype.kind == "f":
        floats: list[float] = np.add.reduceat(values, starts).tolist()
        return floats
    integers = _integers(values)
    low = np.add.reduceat((integers.view(np.uint64) & np.uint64(0xFFFFFFFF)), starts).tolist()
    high = np.add.reduceat(integers >> 32, starts).tolist()
    return [(upper << 32) + lower for upper, lower in zip(high, low, strict=True)]


def _integers(values: I64 | U64 | F64) -> Integers:
    """Round floating-point numbers down, within the range of integers."""
    if values.dtype.kind == "u":
        return values.view(np.uint64)
    if values.dtype.kind == "i":
        return values.view(np.int64)
    limit = float(1 << 62)
    return np.floor(np.clip(values.view(np.float64), -limit, limit)).astype(np.int64)
