"""Encodes the snapshots of an aggregation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stapsdtd.aggregate.aggregation import Aggregation, Computed, Function, HitField, Key, KeySource, KeyValue, Row
from stapsdtd.aggregate.buckets import GREATEST, LEAST, Buckets
from stapsdtd.aggregate.table import Snapshot
from stapsdtd.events.columns import CUT
from stapsdtd.model import Capture
from stapsdtd.runtime.wall_clock import WallClock
from stapsdtd.v1 import stapsdt_pb2 as pb

_BYTES_PER_MESSAGE = 1 << 18
"""Making one takes some 10 ms at most."""
_NUMBER_BYTES = 8
_BUCKET_BYTES = 32

_DTYPES = {pb.Column.TYPE_SIGNED: "<i8", pb.Column.TYPE_UNSIGNED: "<u8", pb.Column.TYPE_FLOAT: "<f8"}

_LEAST_SIGNED, _GREATEST_SIGNED = -(1 << 63), (1 << 63) - 1

_VALUES: dict[Function, Callable[[Row], int | float | None]] = {
    Function.COUNT: lambda row: row.count,
    Function.SUM: lambda row: row.total if row.values else None,
    Function.MIN: lambda row: row.low,
    Function.MAX: lambda row: row.high,
    Function.AVG: lambda row: row.average,
    Function.STDDEV: lambda row: row.deviation,
    Function.VALUES: lambda row: row.values,
}


def messages(
    snapshot: Snapshot,
    aggregation: Aggregation,
    account: pb.Account,
    wall_clock: WallClock,
    waiting: pb.OpenSpans | None = None,
) -> Iterator[pb.Snapshot]:
    """Yield a snapshot in messages of moderate size. account, waiting: as of the snapshot."""
    parts = (alike for part in _parts(snapshot, aggregation) for alike in _divided(part, aggregation))
    rows: list[tuple[Key, Row]] | None = next(parts, [])
    while rows is not None:
        following = next(parts, None)
        message = pb.Snapshot(
            number=snapshot.number,
            begin_ns=wall_clock.time_ns(snapshot.begin_ns),
            end_ns=wall_clock.time_ns(snapshot.end_ns),
            begin_monotonic_ns=snapshot.begin_ns,
            end_monotonic_ns=snapshot.end_ns,
            count=len(rows),
            keys=[
                _column([key[position] for key, _ in rows], is_bytes=_is_bytes(source))
                for position, source in enumerate(aggregation.keys)
            ],
            values=[_column([_VALUES[function](row) for _, row in rows]) for function in _functions(aggregation)],
            histogram=_histogram([row for _, row in rows], aggregation.buckets) if aggregation.buckets else None,
        )
        if following is not None:
            message.more = True
        else:
            message.account.CopyFrom(account)
            if waiting is not None:
                message.open.CopyFrom(waiting)
        yield message
        rows = following


def _parts(snapshot: Snapshot, aggregation: Aggregation) -> Iterator[list[tuple[Key, Row]]]:
    part: list[tuple[Key, Row]] = []
    size = 0
    for key, row in snapshot.rows.items():
        texts = sum(len(value) for value in key if isinstance(value, bytes))
        numbers = len(key) + len(aggregation.functions)
        part.append((key, row))
        size += texts + _NUMBER_BYTES * numbers + _BUCKET_BYTES * len(row.buckets)
        if size > _BYTES_PER_MESSAGE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _functions(aggregation: Aggregation) -> list[Function]:
    """Return the functions that have a column."""
    return [function for function in aggregation.functions if function is not Function.HISTOGRAM]


def _divided(part: list[tuple[Key, Row]], aggregation: Aggregation) -> list[list[tuple[Key, Row]]]:
    """Return the rows, divided where integers would share a column with what only floating-point ones hold."""
    cells = [(*key, *(_VALUES[function](row) for function in _functions(aggregation))) for key, row in part]
    is_exact = all(
        _type_of(column) != pb.Column.TYPE_FLOAT or not any(isinstance(value, int) for value in column)
        for column in zip(*cells, strict=True)
    )
    if is_exact:
        return [part]
    by_types: dict[tuple[pb.Column.Type.ValueType, ...], list[tuple[Key, Row]]] = {}
    for row, values in zip(part, cells, strict=True):
        by_types.setdefault(tuple(_type_of([value]) for value in values), []).append(row)
    return list(by_types.values())


def _type_of(values: Sequence[KeyValue]) -> pb.Column.Type.ValueType:
    """Return the type of a column of values, which may differ in type where sites declare different ones."""
    if any(isinstance(value, bytes) for value in values):
        return pb.Column.TYPE_STRING
    numbers = [value for value in values if isinstance(value, int | float)]
    low, high = min(numbers, default=0), max(numbers, default=0)
    if any(isinstance(number, float) for number in numbers) or low < _LEAST_SIGNED or high > GREATEST:
        return pb.Column.TYPE_FLOAT
    if high <= _GREATEST_SIGNED:
        return pb.Column.TYPE_SIGNED
    return pb.Column.TYPE_UNSIGNED if low >= 0 else pb.Column.TYPE_FLOAT


def _is_bytes(key: KeySource | Computed) -> bool:
    return key.is_buffer if isinstance(key, Capture) else not isinstance(key, HitField) and key.is_bytes


def _column(values: Sequence[KeyValue], *, is_bytes: bool = False) -> pb.Column:
    """is_bytes: those that are no numbers, rather than text."""
    missing = bytes(value is None for value in values)
    column = pb.Column(type=_type_of(values), unavailable=missing if any(missing) else b"")
    if column.type == pb.Column.TYPE_STRING:
        column.type = pb.Column.TYPE_BYTES if is_bytes else pb.Column.TYPE_STRING
        texts = [value if isinstance(value, bytes) else b"" if value is None else b"%d" % value for value in values]
        if not is_bytes and any(cut := bytes(text.endswith(CUT) for text in texts)):
            column.truncated = cut
            texts = [text.removesuffix(CUT) for text in texts]
        column.data = b"".join(texts)
        column.ends = np.cumsum([len(text) for text in texts]).astype("<u4").tobytes()
    else:
        column.data = np.array([0 if value is None else value for value in values], _DTYPES[column.type]).tobytes()
    return column


def _histogram(rows: Sequence[Row], buckets: Buckets) -> pb.Histogram:
    entries = [
        (position, *buckets.bounds(bucket), row.buckets[bucket])
        for position, row in enumerate(rows)
        for bucket in sorted(row.buckets)
    ]
    positions, lows, highs, counts = zip(*entries, strict=True) if entries else ((), (), (), ())
    return pb.Histogram(
        count=len(entries),
        row=np.array(positions, "<u4").tobytes(),
        low=_column([None if low == LEAST else low for low in lows]),
        high=_column([None if high == GREATEST else high for high in highs]),
        counts=np.array(counts, "<u8").tobytes(),
    )
