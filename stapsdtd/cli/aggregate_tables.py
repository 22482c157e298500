"""Snapshots as lines of text: a table of rows, or a histogram for each key.

      COUNT  arg0:str                  execname
      5,000  SELECT * FROM orders      postgres

execname=postgres  5,000 values  p50 12 us  p90 40 us  p99 1.2 ms  max 3.4 ms
      [8 us, 16 us)    4,321  ██████████████████
     [16 us, 32 us)      679  ██▊
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stapsdtd.cli.quantity import bar, format_bound, format_quantity
from stapsdtd.cli.render import cut_mark
from stapsdtd.client import Bucket
from stapsdtd.runtime.text import escape, escape_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stapsdtd.cli.snapshot_output import Shown
    from stapsdtd.client import Snapshot, SnapshotRow, Value

_BAR_CELLS = 40
_PERCENTILES = (50, 90, 99)
_ROUNDED = "(percentiles and buckets: rounded down to whole numbers; to keep fractions, multiply VALUE)"


class Table(Protocol):
    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return a snapshot as lines of text."""


def _left_out(snapshot: Snapshot, shown: int) -> list[str]:
    more = len(snapshot.rows) - shown
    return [f"and {more:,} more {'key' if more == 1 else 'keys'}"] if more else []


@dataclass(frozen=True, slots=True)
class Rows:
    """A table with a line for each key."""

    shown: Shown
    unit: str = ""

    def lines(self, snapshot: Snapshot) -> list[str]:
        rows = self.shown.first(snapshot)
        if not rows:
            return ["no hits"]
        names = list(rows[0].values)
        head = [*(name.upper() for name in names), *self.shown.by]
        cells = [[self._value(name, row) for name in names] + [_shown(part) for part in row.key] for row in rows]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        return [_aligned(line, widths, len(names)) for line in [head, *cells]] + _left_out(snapshot, len(rows))

    def _value(self, name: str, row: SnapshotRow) -> str:
        return format_quantity(row.values[name], "" if name == "count" else self.unit)


def _aligned(cells: Sequence[str], widths: Sequence[int], numbers: int) -> str:
    """Align the first cells, which are numbers, to the right, and the others to the left."""
    aligned = [
        cell.rjust(width) if position < numbers else cell.ljust(width)
        for position, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _shown(value: Value) -> str:
    if value is None:
        return "<unread>"
    if isinstance(value, bool):
        return str(value).lower()
    return escape_bytes(value) if isinstance(value, bytes) else escape(str(value)) + cut_mark(value)


@dataclass(frozen=True, slots=True)
class Histograms:
    """A histogram for each key. They show their sums if these say which key comes first."""

    shown: Shown
    unit: str = ""
    is_linear: bool = False

    def lines(self, snapshot: Snapshot) -> list[str]:
        rows = self.shown.first(snapshot)
        if not rows:
            return ["no hits"]
        lines: list[str] = []
        for row in rows:
            lines += [*([""] if lines else []), self._title(row), *self._bars(row)]
        return lines + _left_out(snapshot, len(rows))

    def _title(self, row: SnapshotRow) -> str:
        keys = [f"{name}={_shown(part)}" for name, part in zip(self.shown.by, row.key, strict=True)]
        values = sum(bucket.count for bucket in row.buckets)
        greatest = row.values["max"]
        percentiles = [
            f"p{percent} {format_quantity(_at_most(row.percentile(percent), greatest), self.unit)}"
            for percent in _PERCENTILES
        ]
        counted = f"{values:,} {'value' if values == 1 else 'values'}"
        parts = [*keys, counted, *percentiles, f"max {format_quantity(greatest, self.unit)}"]
        if self.shown.order == "sum":
            parts.append(f"total {format_quantity(row.values['sum'], self.unit)}")
        if isinstance(greatest, float):
            parts.append(_ROUNDED)
        return "  ".join(parts)

    def _bars(self, row: SnapshotRow) -> list[str]:
        buckets = list(row.buckets if self.is_linear else powers_of_two(row.buckets))
        if not buckets:
            return []
        ranges = [self._range(bucket) for bucket in buckets]
        counts = [f"{bucket.count:,}" for bucket in buckets]
        width, digits = max(map(len, ranges)), max(map(len, counts))
        most = max(bucket.count for bucket in buckets)
        return [
            f"  {name:>{width}}  {count:>{digits}}  {bar(bucket.count / most, _BAR_CELLS)}".rstrip()
            for name, count, bucket in zip(ranges, counts, buckets, strict=True)
        ]

    def _range(self, bucket: Bucket) -> str:
        if bucket.low is None:
            return f"below {format_bound((bucket.high or 0) + 1, self.unit)}"
        low = format_bound(bucket.low, self.unit)
        if bucket.high is None:
            return f"{low} or more"
        return f"[{low}]" if bucket.low == bucket.high else f"[{low}, {format_bound(bucket.high + 1, self.unit)})"


def _at_most(value: int | None, greatest: float | None) -> float | None:
    """Return a percentile, which is a bucket's end, but no value is beyond the greatest one."""
    return value if value is None or greatest is None else min(value, greatest)


def powers_of_two(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Join the buckets between a power of two and the next one, and add empty ones between those that have values."""
    counts: dict[int, int] = {}
    for bucket in buckets:
        value = bucket.low or 0
        number = -(-value).bit_length() if value < 0 else value.bit_length()
        counts[number] = counts.get(number, 0) + bucket.count
    if not counts:
        return []
    joined = []
    for number in range(min(counts), max(counts) + 1):
        least, end = (1 << (abs(number) - 1), (1 << abs(number)) - 1) if number else (0, 0)
        low, high = (-end, -least) if number < 0 else (least, end)
        joined.append(Bucket(low, high, counts.get(number, 0)))
    return joined
