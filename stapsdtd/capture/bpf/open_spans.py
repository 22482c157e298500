"""Reads the starts that wait for their ends from the kernel's tables."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from stapsdtd.aggregate.aggregation import KeyValue
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.sources import Fixed, NumberAt, Source, TextAt
from stapsdtd.capture.bpf.span_kinds import SMALL_SPAN
from stapsdtd.capture.bpf.span_tables import SpanTable
from stapsdtd.events.columns import shortened
from stapsdtd.kernel.bpf_rows import Octets
from stapsdtd.spans.span import MOST_TOLD, NO_OPEN_SPANS, OpenSpan, OpenSpans, Thread

_TEXT = struct.Struct("=II")


def open_in(table: SpanTable) -> OpenSpans:
    """Return the starts that wait in a table. Raises OSError."""
    with table.lock:
        if table.is_removed or table.entries is None:
            return NO_OPEN_SPANS
        keys, entries = table.entries.look_up_all()
    begun = entries[:, :8].copy().view(np.uint64)[:, 0]
    wanted = np.flatnonzero(begun < layout.UNWANTED_START)
    oldest = wanted[np.argsort(begun[wanted], kind="stable")][:MOST_TOLD]
    read = _reader_of(table)
    return OpenSpans(tuple(read(keys[row], entries[row].tobytes()) for row in oldest), len(wanted))


def _reader_of(table: SpanTable) -> Callable[[Octets, bytes], OpenSpan]:
    """Return what makes an open span of a key and of what is kept of its start."""
    sources = table.kept.sources if table.kept else ()

    def small(_key: Octets, entry: bytes) -> OpenSpan:
        start = np.frombuffer(entry, layout.SMALL_ENTRY)[0]
        return OpenSpan(int(start["time_ns"]), _thread(int(start["thread"])), (), ())

    def of_words(key: Octets, entry: bytes) -> OpenSpan:
        start = np.frombuffer(entry, layout.SPAN_ENTRY)[0]
        words, missing = start["words"].tolist(), int(start["missing"])
        parts = zip(key.view(np.uint64).tolist(), table.key_signs, strict=False)
        values = tuple(_number(words, missing, source) for source in sources)
        thread = _thread(int(start["thread"]))
        return OpenSpan(words[0], thread, tuple(_signed(part, is_signed=each) for part, each in parts), values)

    def of_record(_key: Octets, entry: bytes) -> OpenSpan:
        record = np.frombuffer(entry, layout.RECORD, 1)[0]
        values = tuple(_value(entry, int(record["missing"]), source) for source in sources)
        return OpenSpan(int(record["time_ns"]), Thread(int(record["pid"]), int(record["tid"])), (), values)

    if table.kind.start_class:
        return of_record
    return small if table.kind == SMALL_SPAN else of_words


def _thread(packed: int) -> Thread:
    return Thread(packed >> 32, packed & 0xFFFFFFFF)


def _signed(number: int, *, is_signed: bool) -> int:
    return number - (1 << 64) if is_signed and number >= 1 << 63 else number


def _number(words: list[int], missing: int, source: Source) -> KeyValue:
    if not isinstance(source, NumberAt) or missing >> source.position & 1:
        return None
    return _signed(words[source.position], is_signed=source.is_signed)


def _value(record: bytes, missing: int, source: Source) -> KeyValue:
    """Return a value of a record that was kept of a start; None for what only the daemon can complete."""
    match source:
        case Fixed(value=value):
            return value
        case NumberAt(position=position, is_signed=is_signed, float_bytes=0) if not missing >> position & 1:
            (number,) = struct.unpack_from("=Q", record, layout.RECORD.itemsize + 8 * position)
            return _signed(number, is_signed=is_signed)
        case TextAt(position=position, max_bytes=max_bytes, is_raw=is_raw) if not missing >> position & 1:
            offset, length = _TEXT.unpack_from(record, layout.RECORD.itemsize + 8 * position)
            text = record[offset : offset + length]
            return text[:max_bytes] if is_raw else shortened(text, max_bytes)
        case _:
            return None
