"""Fields and values of records into columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stapsdtd.capture.bpf.cgroup_names import MOST_LOOKUPS, CgroupNames
from stapsdtd.capture.bpf.layout import RECORD, RECORD_HEADER
from stapsdtd.capture.bpf.reading import ActivePlan
from stapsdtd.capture.bpf.rings import Records
from stapsdtd.capture.bpf.sources import CgroupAt, Fixed, NoText, NumberAt, OfStartAt, Source, TextAt
from stapsdtd.capture.bpf.tables import Generation
from stapsdtd.capture.bpf.unread import Unread
from stapsdtd.events.columns import CUT, U64, Bools, Indices, Numbers, Strings, ValueColumn, floats

_BYTES_FOR_SLICE = 2048
"""What can be copied in the time by which a slice of bytes is faster than one of a memoryview."""

_FIRST_VALUE = RECORD.itemsize // 8
_MISSING = RECORD.fields["missing"][1] // 4 if RECORD.fields else 0
"""Of a record, in words of 8 and of 4 bytes."""

Rows = Indices | None
"""Records of a ring by their positions, in rising order; None is all of them."""


class ColumnReader:
    """Makes columns of the records of one ring, of all of them or of some rows.

    from_file, unavailable: how many values that hits could not read were found in files, and how many were not.
    """

    def __init__(self, records: Records, raw: memoryview, stride: int, cgroups: CgroupNames) -> None:
        self._records = records
        self._values_of_records: U64 = records["values"]
        self._raw = raw
        self._stride = stride
        self._cgroups = cgroups
        self._lookups_left = MOST_LOOKUPS
        self._copied: bytes | None = None
        # on small arrays several times as fast as any()
        self._some_missing = np.count_nonzero(records["missing"]) > 0
        self._unread = Unread(records, {})
        self.from_file = self.unavailable = 0

    def use(self, plans: Mapping[Generation, ActivePlan]) -> None:
        """Take values that hits could not read from the files of these plans."""
        if self._some_missing:
            self._unread = Unread(self._records, plans)

    def unread(self) -> Iterator[tuple[int, int, int]]:
        return self._unread.places() if self._some_missing else iter(())

    def gather(self, name: str, rows: Rows) -> npt.NDArray[Any]:
        """Copy a field out of the ring."""
        column = self._records[name]
        return column.copy() if rows is None else column[rows]

    def _values(self, position: int, rows: Rows) -> U64:
        values = self._values_of_records[:, position]
        return values.copy() if rows is None else values[rows]

    def _missing(self, position: int, rows: Rows) -> Bools | None:
        if not self._some_missing:
            return None
        missing = (self.gather("missing", rows) >> np.uint64(position) & np.uint64(1)).astype(np.bool_)
        return missing if missing.any() else None

    def column(self, source: Source, rows: Rows) -> ValueColumn:
        count = len(self._records) if rows is None else len(rows)
        match source:
            case NumberAt(position, is_signed, float_bytes):
                numbers, missing = self._values(position, rows), self._missing(position, rows)
                if missing is not None:
                    before = missing.copy()
                    self._unread.fill_numbers(numbers, missing, position, rows)
                    self._count(before, missing)
                if float_bytes:
                    return Numbers(floats(numbers, float_bytes), missing)
                return Numbers(numbers.view(np.int64) if is_signed else numbers, missing)
            case TextAt():
                return self._texts(rows, source)
            case OfStartAt(position, of_start):
                return self._of_start(rows, position, of_start)
            case Fixed(value, is_signed, is_float):
                missing = np.ones(count, np.bool_) if value is None else None
                if is_float:
                    return Numbers(np.zeros(count, np.float64), missing)
                bits = np.full(count, (value or 0) % (1 << 64), np.uint64)
                return Numbers(bits.view(np.int64) if is_signed else bits, missing)
            case NoText():
                return Strings.of([None] * count)
            case CgroupAt(position, is_container):
                column, looked_up = self._cgroups.column(
                    self._values(position, rows), self._lookups_left, is_container=is_container
                )
                self._lookups_left -= looked_up
                return column

    def _texts(self, rows: Rows, source: TextAt) -> Strings:
        offsets, missing = self._values(source.position, rows), self._missing(source.position, rows)
        constants = {}
        if missing is not None:
            constants = self._unread.texts(offsets, missing, source, rows)
            offsets[missing] = 0
        texts, lengths = self._found(offsets, self._begins(rows), source)
        for row, text in constants.items():
            texts[row] = text
            lengths[row] = len(text)
        if missing is not None:
            before = missing.copy()
            missing[list(constants)] = False
            self._count(before, missing)
        return Strings(np.cumsum(lengths, dtype=np.uint32), b"".join(texts), missing, source.is_raw)

    def _begins(self, rows: Rows) -> Indices:
        """Return where records begin in the memory of the ring."""
        return (np.arange(len(self._records)) if rows is None else rows) * self._stride + RECORD_HEADER

    def _found(self, places: U64, begins: Indices, source: TextAt) -> tuple[list[bytes | memoryview], Indices]:
        """Return texts and their lengths. places: as records that begin there have them."""
        most = np.uint64(source.max_bytes)
        had = places >> np.uint64(32)
        lengths = np.minimum(had, most).astype(np.intp)
        begins = begins + (places & np.uint64(0xFFFFFFFF)).astype(np.intp)
        content = self._content(len(begins))
        ends = (begins + lengths).tolist()
        texts = [content[begin:end] for begin, end in zip(begins.tolist(), ends, strict=True)]
        if not source.is_raw:
            for row in np.flatnonzero(had > most).tolist():
                texts[row] = bytes(texts[row]) + CUT
                lengths[row] += 1
        return texts, lengths

    def _of_start(self, rows: Rows, position: int, source: NumberAt | TextAt) -> ValueColumn:
        """Return a value of the records that are kept of starts, which pairs' records have as a value."""
        places, missing = self._values(position, rows), self._missing(position, rows)
        begins = self._begins(rows) + (places & np.uint64(0xFFFFFFFF)).astype(np.intp)
        words: U64 = np.frombuffer(self._raw, np.uint64, len(self._records) * self._stride // 8)
        # there may be none, and then not so many words behind it either
        values = words.take(begins // 8 + _FIRST_VALUE + source.position, mode="clip")
        of_start = words.view(np.uint32).take(begins // 4 + _MISSING, mode="clip")
        unread = (of_start >> np.uint32(source.position) & np.uint32(1)).astype(np.bool_)
        unread = unread if missing is None else unread | missing
        self.unavailable += int(np.count_nonzero(unread))
        values[unread] = 0
        unavailable = unread if unread.any() else None
        if isinstance(source, TextAt):
            texts, lengths = self._found(values, begins, source)
            return Strings(np.cumsum(lengths, dtype=np.uint32), b"".join(texts), unavailable, source.is_raw)
        if source.float_bytes:
            return Numbers(floats(values, source.float_bytes), unavailable)
        return Numbers(values.view(np.int64) if source.is_signed else values, unavailable)

    def _content(self, texts: int) -> bytes | memoryview:
        """Return the memory of the records, copied if so many slices of bytes are worth it."""
        size = len(self._records) * self._stride
        if self._copied is None and size < _BYTES_FOR_SLICE * texts:
            self._copied = bytes(self._raw[:size])
        return self._raw if self._copied is None else self._copied

    def _count(self, before: Bools, missing: Bools) -> None:
        left = int(np.count_nonzero(missing))
        self.from_file += int(np.count_nonzero(before)) - left
        self.unavailable += left
