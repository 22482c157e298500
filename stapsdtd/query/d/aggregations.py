"""Aggregations: what a D program's @names came to, by key, in integers of 64 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stapsdtd.query.d.scales import Scale
from stapsdtd.query.d.values import INT64_MAX, INT64_MIN, Type, Value, quotient, signed

Key = tuple[Value, ...]
Rank = tuple[int, int]
"""What rows are sorted by: their result, or for a distribution the sum of its values and how many of them are 0."""

MAX_ROWS = 1 << 16


class Function(Enum):
    COUNT = "count"
    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    STDDEV = "stddev"
    QUANTIZE = "quantize"
    LQUANTIZE = "lquantize"
    LLQUANTIZE = "llquantize"


@dataclass(slots=True)
class Row:
    """What the values of one key came to. bins: how many values each bin of a scale has, which may be negative, since
    programs can say by how much a value counts.
    """

    count: int = 0
    sum: int = 0
    squares: int = 0
    least: int = INT64_MAX
    greatest: int = INT64_MIN
    bins: dict[int, int] = field(default_factory=dict)

    def merge(self, other: Row) -> None:
        """Add what the values of another row came to."""
        self.count = signed(self.count + other.count)
        self.sum = signed(self.sum + other.sum)
        self.squares += other.squares
        self.least = min(self.least, other.least)
        self.greatest = max(self.greatest, other.greatest)
        for number, count in other.bins.items():
            self.bins[number] = signed(self.bins.get(number, 0) + count)


@dataclass(slots=True)
class Aggregation:
    """One @name. scale: of functions that make a distribution. dropped: values for whose key there was no room."""

    name: str
    function: Function
    key: tuple[Type, ...] = ()
    scale: Scale | None = None
    max_rows: int = MAX_ROWS
    rows: dict[Key, Row] = field(default_factory=dict)
    normal: int = 1
    dropped: int = 0
    is_printed: bool = False

    def add(self, key: Key, value: int = 0, increment: int = 1) -> None:
        """Add a value. increment: by how much it counts in a distribution."""
        value = signed(value)
        bins = {} if self.scale is None else {self.scale.bin(value): signed(increment)}
        self.merge(key, Row(1, value, value * value, value, value, bins))

    def merge(self, key: Key, row: Row) -> None:
        """Add what values came to that were added up elsewhere."""
        if (known := self.rows.get(key)) is not None:
            known.merge(row)
        elif len(self.rows) < self.max_rows:
            self.rows[key] = new = Row()
            new.merge(row)
        else:
            self.dropped += row.count

    def bins_of(self, buckets: Iterable[tuple[int | None, int | None, int]]) -> dict[int, int]:
        """Return how many values each bin has. buckets: least and greatest value, one of them None for an open end, and
        count. Raises ValueError for a bucket that has values of several bins.
        """
        bins: dict[int, int] = {}
        for low, high, count in buckets:
            least, greatest = INT64_MIN if low is None else low, INT64_MAX if high is None else high
            if self.scale is None or (number := self.scale.bin(least)) != self.scale.bin(greatest):
                raise ValueError(f"@{self.name}: no bin has the values from {least} to {greatest}")
            bins[number] = bins.get(number, 0) + count
        return bins

    def clear(self) -> None:
        """Set what each key came to back to nothing. The keys stay."""
        for key in self.rows:
            self.rows[key] = Row()

    def truncate(self, count: int = 0) -> None:
        """Keep the keys of the `count` greatest results, or of the least if it is negative, and remove others."""
        ranked = sorted(self.rows, key=lambda key: (self.rank(self.rows[key]), key_rank(key)), reverse=count >= 0)
        for key in ranked[abs(count) :]:
            del self.rows[key]

    def normalize(self, normal: int) -> None:
        """Show results divided by `normal`, which must not be 0."""
        if not normal:
            raise ValueError(f"@{self.name}: results cannot be normalized by 0")
        self.normal = normal

    def denormalize(self) -> None:
        self.normal = 1

    def number(self, row: Row | None) -> int:
        """Return the result, of functions without a scale; None stands for a key without values."""
        return 0 if row is None else _number(self.function, row, self.normal)

    def rank(self, row: Row | None) -> Rank:
        """Return what to sort by, which normalizing does not change."""
        if row is None:
            return 0, 0
        if self.scale is None:
            return _number(self.function, row, 1), 0
        weighted = sum(self.scale.weights[number] * count for number, count in row.bins.items())
        return weighted, 0 if self.scale.zero is None else row.bins.get(self.scale.zero, 0)


def _number(function: Function, row: Row, normal: int) -> int:
    match function:
        case Function.COUNT:
            return quotient(row.count, normal)
        case Function.SUM:
            return quotient(row.sum, normal)
        case Function.MIN:
            return quotient(row.least, normal)
        case Function.MAX:
            return quotient(row.greatest, normal)
        case Function.AVG:
            return quotient(quotient(row.sum, normal), row.count) if row.count else 0
        case Function.STDDEV:
            return _deviation(row, normal) if row.count else 0
        case Function.QUANTIZE | Function.LQUANTIZE | Function.LLQUANTIZE:
            raise ValueError(f"{function.value}() has no single result")


def _deviation(row: Row, normal: int) -> int:
    """As DTrace has it: in integers, and with the squares divided by `normal` once."""
    mean = quotient(quotient(row.sum, normal), row.count)
    return math.isqrt(max(quotient(quotient(row.squares, normal), row.count) - mean * mean, 0))


def key_rank(key: Sequence[Value], position: int = 0) -> tuple[int | str | bytes, ...]:
    """Return what keys are sorted by: integers without their sign, as DTrace. position: of the first to compare."""
    start = position if 0 <= position < len(key) else 0
    ordered = (*key[start:], *key[:start])
    return tuple(value & ((1 << 64) - 1) if isinstance(value, int) else value for value in ordered)
