"""Decodes Columns messages into numpy arrays over the message's bytes. Imported only if columns are requested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stapsdtd.client.column_batch import Column, ColumnBatch, NumberColumn, StringColumn
from stapsdtd.client.errors import ProtocolError
from stapsdtd.v1 import stapsdt_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stapsdtd.client.messages import DescribedSite

_NUMBERS = {pb.Column.TYPE_SIGNED: "<i8", pb.Column.TYPE_UNSIGNED: "<u8", pb.Column.TYPE_FLOAT: "<f8"}


def column_batches(message: pb.Columns, sites: Mapping[int, DescribedSite]) -> tuple[ColumnBatch, ...]:
    offset_ns = message.realtime_offset_ns if message.HasField("realtime_offset_ns") else None
    return tuple(_column_batch(block, sites, offset_ns) for block in message.blocks)


def _column_batch(columns: pb.ColumnBlock, sites: Mapping[int, DescribedSite], offset_ns: int | None) -> ColumnBatch:
    count = columns.count
    return ColumnBatch(
        count=count,
        seq=_array(columns.seq, "<u8", count),
        time_ns=_array(columns.time_ns, "<i8", count),
        pid=_array(columns.pid, "<i4", count),
        tid=_array(columns.tid, "<i4", count),
        cpu=_array(columns.cpu, "<u2", count),
        comm=_array(columns.comm, "S16", count),
        site_id=_array(columns.site_id, "<u4", count),
        values=tuple(_column(column, count) for column in columns.values),
        sites=sites,
        realtime_offset_ns=offset_ns,
    )


def _column(column: pb.Column, count: int) -> Column:
    unavailable = _array(column.unavailable, "u1", count) != 0 if column.unavailable else None
    if column.type in {pb.Column.TYPE_STRING, pb.Column.TYPE_BYTES}:
        truncated = _array(column.truncated, "u1", count) != 0 if column.truncated else None
        return StringColumn(
            column.data, _array(column.ends, "<u4", count), unavailable, truncated, column.type == pb.Column.TYPE_BYTES
        )
    if column.type not in _NUMBERS:
        raise ProtocolError(f"the server sent column type {column.type}, which this client does not know")
    return NumberColumn(_array(column.data, _NUMBERS[column.type], count), unavailable)


def _array(data: bytes, dtype: str, count: int) -> NDArray[Any]:
    if len(data) != count * np.dtype(dtype).itemsize:
        raise ProtocolError(f"the server sent {len(data)} bytes as {count} numbers of type {dtype}")
    return np.frombuffer(data, dtype)
