"""What an aggregation came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stapsdtd.client.messages import OpenSpans, Value
    from stapsdtd.client.server import Account


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many values were from low to high, both included; None for an open end."""

    low: int | None
    high: int | None
    count: int


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """What the hits of one key came to.

    key: in the order of `Aggregate.by`; None for what could not be read. values: by function, without histograms; None
    if no hit had a value. buckets: those that have values, in rising order.
    """

    key: tuple[Value, ...]
    values: Mapping[str, int | float | None]
    buckets: tuple[Bucket, ...] = ()

    def percentile(self, percent: float) -> int | None:
        """Return the greatest value of the bucket that so many percent of the values reach; None without values."""
        rest = sum(bucket.count for bucket in self.buckets) * percent / 100
        for bucket in self.buckets:
            rest -= bucket.count
            if rest <= 0:
                return bucket.low if bucket.high is None else bucket.high
        return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The rows of an interval or, if the aggregation is cumulative, since the beginning.

    number: counts from 1. begin_ns, end_ns: Unix time, as the server's clock showed it. account: as of end_ns. tag: of
    the clause that computes it. open: the spans that were open when it was sent, if there were some and no later
    snapshot was there. begin_monotonic_ns, end_monotonic_ns: the same by CLOCK_MONOTONIC of the server's host; None
    from an older server.
    """

    number: int
    begin_ns: int
    end_ns: int
    rows: tuple[SnapshotRow, ...]
    account: Account
    tag: str = ""
    open: OpenSpans | None = None
    begin_monotonic_ns: int | None = None
    end_monotonic_ns: int | None = None

    @property
    def duration_ns(self) -> int:
        """Return how long what it covers took, whether or not the clock was set meanwhile."""
        if self.begin_monotonic_ns is None or self.end_monotonic_ns is None:
            return self.end_ns - self.begin_ns
        return self.end_monotonic_ns - self.begin_monotonic_ns

    def most_frequent(self, limit: int | None = None) -> list[SnapshotRow]:
        """Return the rows by falling count, which must be one of the functions; all of them or at most limit."""
        return self.greatest("count", limit)

    def greatest(self, function: str, limit: int | None = None) -> list[SnapshotRow]:
        """Return the rows by a falling value of one of the functions; all of them or at most limit."""
        rows = sorted(self.rows, key=lambda row: (-(row.values[function] or 0), str(row.key)))
        return rows[:limit]
