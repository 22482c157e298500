"""Encodes events as StreamResponses with Columns. The bytes of a column are copied once, into the message."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from stapsdtd.api.wire import Message
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import U64, Strings, ValueColumn
from stapsdtd.sessions.log import Entry
from stapsdtd.v1 import stapsdt_pb2 as pb

_TYPES = {
    "signed": pb.Column.TYPE_SIGNED,
    "unsigned": pb.Column.TYPE_UNSIGNED,
    "float": pb.Column.TYPE_FLOAT,
    "string": pb.Column.TYPE_STRING,
    "bytes": pb.Column.TYPE_BYTES,
}


def message(entry: Entry, realtime_offset_ns: int) -> bytes:
    """Return an entry's events as one serialized StreamResponse, with a block for each combination of value types."""
    columns = Message()
    for rows, events in entry.batch.homogeneous():
        seqs = rows.astype(np.uint64) + np.uint64(entry.first_seq)
        columns.add_message(pb.Columns.BLOCKS_FIELD_NUMBER, _block(events, seqs, realtime_offset_ns))
    columns.add_number(pb.Columns.NEXT_SEQ_FIELD_NUMBER, entry.next_seq)
    columns.add_number(pb.Columns.REALTIME_OFFSET_NS_FIELD_NUMBER, realtime_offset_ns % (1 << 64))
    response = Message()
    response.add_message(pb.StreamResponse.COLUMNS_FIELD_NUMBER, columns)
    return response.join()


def _block(events: EventBatch, seqs: U64, realtime_offset_ns: int) -> Message:
    block = Message()
    block.add_number(pb.ColumnBlock.COUNT_FIELD_NUMBER, len(events))
    block.add_array(pb.ColumnBlock.SEQ_FIELD_NUMBER, _little_endian(seqs))
    block.add_array(pb.ColumnBlock.TIME_NS_FIELD_NUMBER, _little_endian(events.time_ns + realtime_offset_ns))
    block.add_array(pb.ColumnBlock.PID_FIELD_NUMBER, _little_endian(events.pid))
    block.add_array(pb.ColumnBlock.TID_FIELD_NUMBER, _little_endian(events.tid))
    block.add_array(pb.ColumnBlock.CPU_FIELD_NUMBER, _little_endian(events.cpu))
    block.add_array(pb.ColumnBlock.COMM_FIELD_NUMBER, events.comm)
    block.add_array(pb.ColumnBlock.SITE_ID_FIELD_NUMBER, _little_endian(events.site_id))
    for table in events.tables:
        for column in table.columns:
            block.add_message(pb.ColumnBlock.VALUES_FIELD_NUMBER, _column(column))
    return block


def _column(column: ValueColumn) -> Message:
    message = Message()
    message.add_number(pb.Column.TYPE_FIELD_NUMBER, _TYPES[column.layout])
    if isinstance(column, Strings):
        if (cut := column.cut) is not None:
            message.add_array(pb.Column.TRUNCATED_FIELD_NUMBER, cut)
            column = column.unmarked()
        message.add_bytes(pb.Column.DATA_FIELD_NUMBER, column.data)
        message.add_array(pb.Column.ENDS_FIELD_NUMBER, _little_endian(column.ends))
    else:
        message.add_array(pb.Column.DATA_FIELD_NUMBER, _little_endian(column.data))
    if column.unavailable is not None:
        message.add_array(pb.Column.UNAVAILABLE_FIELD_NUMBER, column.unavailable)
    return message


def _little_endian(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column if sys.byteorder == "little" else column.byteswap()
