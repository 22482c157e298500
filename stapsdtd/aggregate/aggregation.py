"""What a client wants to know of the hits, and the rows that answer it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Protocol

from stapsdtd.aggregate.buckets import Buckets
from stapsdtd.events.columns import ValueColumn
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.model import Capture, Site


class Function(StrEnum):
    """COUNT counts hits, VALUES those that have a value, HISTOGRAM the values of each bucket. The others are computed
    of the values.
    """

    COUNT = "count"
    VALUES = "values"
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
    MODULE_PATH = "module_path"
    FUNCTION = "function"
    NAME = "name"


SITE_FIELDS = frozenset({HitField.PROVIDER, HitField.MODULE, HitField.MODULE_PATH, HitField.FUNCTION, HitField.NAME})

KeySource = Capture | HitField


class Computed(Protocol):
    """A key or a value that the daemon computes of events: an expression. Those of equal text are equal."""

    @property
    def text(self) -> str:
        """How it is computed, for messages."""

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What has to be captured for it."""

    @property
    def is_bytes(self) -> bool:
        """Whether its values are bytes, and no text."""

    def why_not_at(self, site: Site) -> str | None:
        """Return why it cannot be computed at a site, for users; None if it can."""

    def column(self, events: SiteEvents) -> ValueColumn:
        """Return its value for each event."""


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
    keys: tuple[KeySource | Computed, ...] = ()
    value: Capture | Computed | None = None
    buckets: Buckets | None = None
    max_keys: int = 10_000
    is_cumulative: bool = False
    interval_ms: int = 0

    @property
    def needs_value(self) -> bool:
        return any(function is not Function.COUNT for function in self.functions)

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What has to be captured for the columns, each once."""
        each = ((column,) if isinstance(column, Capture) else column.captures for column in self.columns)
        return tuple(dict.fromkeys(chain.from_iterable(each)))

    @property
    def columns(self) -> tuple[Capture | Computed, ...]:
        """What differs from event to event: the keys that are no HitField, then the value, each once."""
        keys = [key for key in self.keys if not isinstance(key, HitField)]
        return tuple(dict.fromkeys(keys if self.value is None else [*keys, self.value]))

    @property
    def computed(self) -> tuple[Computed, ...]:
        return tuple(column for column in self.columns if not isinstance(column, Capture))


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
