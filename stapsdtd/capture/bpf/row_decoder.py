"""Keys and rows of the kernel's tables as `Key` and `Row`.

    variant 3, missing 0, bucket 5 | 42 | "app"      count 17, …
    ──► layouts[3] ──► site 0: {(42, b"app"): Row(17, …, buckets={5: 17})}

What differs in the bucket alone is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from stapsdtd.aggregate.aggregation import Aggregation, Function, Key, KeyValue, Row
from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.cgroup_names import CgroupNames
from stapsdtd.capture.bpf.key_layout import BytesPart, CgroupPart, FixedPart, KeyLayout, NumberPart, Part, TextPart
from stapsdtd.capture.engine import Rows
from stapsdtd.events.columns import U64, shortened
from stapsdtd.kernel.bpf_rows import Octets

_WORD = 1 << 64
_SIGN = 1 << 63

_NO_ROWS: Octets = np.empty((0, layout.ROW.itemsize), np.uint8)
_ROWS_OF_PART = 512
"""Some 2 ms, with what the daemon does with them."""

_Numbers = tuple[int, int, int, int, int]
"""layout.ROW."""


class TakenRows:
    """Implements `capture.engine.ManyRows`. is_waiting: they are still to be decoded."""

    def __init__(
        self,
        decoder: RowDecoder,
        aggregation: Aggregation,
        layouts: Mapping[int, KeyLayout],
        keys: Octets,
        rows: Octets,
    ) -> None:
        """layouts: by variant."""
        self._decoder = decoder
        self._aggregation = aggregation
        self._layouts = layouts
        self._keys = keys
        self._rows = rows
        self.is_waiting = True

    @property
    def hits(self) -> int:
        return _hits(self._rows)

    def parts(self) -> Iterator[tuple[int, Rows]]:
        try:
            for first in range(0, len(self._keys), _ROWS_OF_PART):
                keys, rows = (each[first : first + _ROWS_OF_PART] for each in (self._keys, self._rows))
                yield _hits(rows), self._decoder.decode(self._aggregation, self._layouts, keys, rows)
        finally:
            self.drop()

    def drop(self) -> None:
        self.is_waiting = False
        self._keys = self._rows = _NO_ROWS


def _hits(rows: Octets) -> int:
    return int(rows.view(layout.ROW)["count"].sum())


class RowDecoder:
    """Called from one thread at a time."""

    def __init__(self, cgroups: CgroupNames) -> None:
        self._cgroups = cgroups

    def decode(self, aggregation: Aggregation, layouts: Mapping[int, KeyLayout], keys: Octets, rows: Octets) -> Rows:
        """layouts: by variant."""
        decoded: dict[int, dict[Key, Row]] = {}
        words = keys.view(np.uint64)
        variants = (words[:, 0] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        numbers = rows.view(layout.ROW)[:, 0] if len(rows) else np.empty(0, layout.ROW)
        for variant in np.unique(variants).tolist():
            chosen = variants == variant
            key_layout = layouts[variant]
            of_site = decoded.setdefault(key_layout.site_id, {})
            self._add(aggregation, key_layout, words[chosen], numbers[chosen].tolist(), of_site)
        return decoded

    def _add(
        self,
        aggregation: Aggregation,
        key_layout: KeyLayout,
        words: U64,
        numbers: Iterable[_Numbers],
        rows: dict[Key, Row],
    ) -> None:
        """rows: gets those of these keys."""
        missing = (words[:, 0] >> np.uint64(32) & np.uint64(0xFFFF)).astype(np.uint16)
        buckets = (words[:, 0] >> np.uint64(48)).astype(np.uint16).view(np.int16).tolist()
        has_values = ((missing & layout.VALUE_MISSING) == 0).tolist()
        is_signed = key_layout.is_signed
        for key, bucket, has_value, row_numbers in zip(
            self._keys(key_layout.parts, words, missing), buckets, has_values, numbers, strict=True
        ):
            if is_signed is None or not has_value:
                row = Row(row_numbers[0])
            else:
                row = _row(aggregation, row_numbers, bucket, is_signed=is_signed)
            known = rows.get(key)
            if known is None:
                rows[key] = row
            else:
                known.add(row)

    def _keys(self, parts: Sequence[Part], words: U64, missing: npt.NDArray[np.uint16]) -> list[Key]:
        columns: list[list[KeyValue]] = []
        at, number = 1, 0
        for part in parts:
            if isinstance(part, FixedPart):
                columns.append([part.value] * len(words))
                continue
            column = self._column(part, words, at)
            for row in np.flatnonzero(missing >> np.uint16(number) & np.uint16(1)).tolist():
                column[row] = None
            columns.append(column)
            at += part.words if isinstance(part, TextPart | BytesPart) else 1
            number += 1
        return list(zip(*columns, strict=True)) if columns else [()] * len(words)

    def _column(self, part: NumberPart | TextPart | BytesPart | CgroupPart, words: U64, at: int) -> list[KeyValue]:
        match part:
            case NumberPart(is_signed):
                numbers = words[:, at].view(np.int64) if is_signed else words[:, at]
                return list(numbers.tolist())
            case TextPart(count, max_bytes):
                texts = np.ascontiguousarray(words[:, at : at + count]).view(f"S{8 * count}")
                return [shortened(text, max_bytes) for text in texts[:, 0].tolist()]
            case BytesPart(size):
                octets = np.ascontiguousarray(words[:, at : at + part.words]).view(np.uint8)[:, :size]
                return list(np.ascontiguousarray(octets).view(f"V{size}")[:, 0].tolist())
            case CgroupPart(is_container):
                ids = np.ascontiguousarray(words[:, at])
                return list(self._cgroups.column(ids, len(ids), is_container=is_container)[0].tolist())


def _row(aggregation: Aggregation, numbers: _Numbers, bucket: int, *, is_signed: bool) -> Row:
    """Return the row of hits that have a value."""
    count, total, carry, low, high = numbers
    row = Row(count, values=count)
    if Function.SUM in aggregation.functions or Function.AVG in aggregation.functions:
        row.total = carry * _WORD + total
    if Function.MIN in aggregation.functions or Function.MAX in aggregation.functions:
        row.low, row.high = _value(low ^ _WORD - 1, is_signed=is_signed), _value(high, is_signed=is_signed)
    if aggregation.buckets is not None:
        row.buckets[bucket] = count
    return row


def _value(ordered: int, *, is_signed: bool) -> int:
    """Return the value that the program compares as an unsigned number."""
    if not is_signed:
        return ordered
    return ordered - _SIGN
