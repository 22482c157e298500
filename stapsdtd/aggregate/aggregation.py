"""What a client wants to know of the hits, and the rows that answer it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from stapsdtd.aggregate.buckets import Buckets
from stapsdtd.model import Capture


class Function(StrEnum):
    """COUNT counts hits, HISTOGRAM the values of each bucket. The others are computed of the values."""

    COUNT = "count"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    STDDEV = "stddev"
    HISTOGRAM = "histogram"


class HitField(StrEnum):
    """A property of a hit, or of its probe, that is no capture."""

    PID = "pid"
    TID = "tid"
    CPU = "cpu"
    EXECNAME = "execname"
    PROVIDER = "provider"
    MODULE = "module"
    FUNCTION = "function"
    NAME = "name"


SITE_FIELDS = frozenset({HitField.PROVIDER, HitField.MODULE, HitField.FUNCTION, HitField.NAME})

KeySource = Capture | HitField

KeyValue = int | float | bytes | None
"""None: it could not be read."""
Key = tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """functions of value, for each combination of the keys.

    value: None if the functions need none. buckets: those of HISTOGRAM. max_keys: how many combinations are kept; hits
    of others are lost. is_cumulative: a snapshot tells of all hits so far, rather than of those since the one before.
    interval_ms: how often there is a snapshot; 0 for one at the end.
    """

    functions: tuple[Function, ...]
    keys: tuple[KeySource, ...] = ()
    value: Capture | None = None
    buckets: Buckets | None = None
    max_keys: int = 10_000
    is_cumulative: bool = False
    interval_ms: int = 0

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What has to be captured: the keys that are captures, each once, then the value."""
        captures = [key for key in self.keys if isinstance(key, Capture)]
        return tuple(dict.fromkeys(captures if self.value is None else [*captures, self.value]))


@dataclass(slots=True)
class Row:
    """What the hits of one key add up to. All but count are of values, so that hits without a value count only there.

    values: how many there were. total: their sum. mean, squares: of the values, and of the squared differences from it.
    buckets: counts by bucket.
    """

    count: int = 0
    values: int = 0
    total: int | float = 0
    low: int | float | None = None
    high: int | float | None = None
    mean: float = 0.0
    squares: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)

    @property
    def average(self) -> float | None:
        return self.total / self.values if self.values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the values as a population."""
        return math.sqrt(self.squares / self.values) if self.values else None

    def copy(self) -> Row:
        return replace(self, buckets=self.buckets.copy())

    def add(self, other: Row) -> None:
        """Add what other hits of the same key add up to."""
        self.count += other.count
        if other.values:
            values = self.values + other.values
            difference = other.mean - self.mean
            # Chan, Golub and LeVeque, 1979: keeps the precision that the difference of two large sums would lose
            self.squares += other.squares + difference * difference * self.values * other.values / values
            self.mean += difference * other.values / values
            self.values = values
            self.total += other.total
            self.low = other.low if self.low is None or other.low is None else min(self.low, other.low)
            self.high = other.high if self.high is None or other.high is None else max(self.high, other.high)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
