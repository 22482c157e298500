"""What an aggregation came to."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stapsdtd.client import decode
from stapsdtd.client.errors import ProtocolError
from stapsdtd.client.events import values_of
from stapsdtd.subscribe_options import HISTOGRAMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stapsdtd.client.messages import OpenSpans, Value
    from stapsdtd.client.server import Account
    from stapsdtd.v1 import stapsdt_pb2 as pb


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


@dataclass(slots=True)
class SnapshotReader:
    """Puts a clause's snapshots together from the messages of a stream. functions: as in the request."""

    functions: Sequence[str]
    tag: str = ""
    _rows: list[SnapshotRow] = field(default_factory=list)

    def restart(self) -> None:
        """Forget the beginning of a snapshot: a new stream sends all of it."""
        self._rows = []

    def read(self, message: pb.Snapshot) -> Snapshot | None:
        """Return a snapshot with its last message. Raises ProtocolError."""
        try:
            self._rows += self._decoded(message)
        except (struct.error, ValueError, IndexError) as error:
            raise ProtocolError(f"the server sent an inconsistent snapshot: {error}") from error
        if message.more:
            return None
        rows, self._rows = self._rows, []
        account = decode.account(message.account)
        waiting = decode.open_spans(message.open, self.tag) if message.HasField("open") else None
        return Snapshot(
            message.number,
            message.begin_ns,
            message.end_ns,
            tuple(rows),
            account,
            self.tag,
            waiting,
            message.begin_monotonic_ns if message.HasField("begin_monotonic_ns") else None,
            message.end_monotonic_ns if message.HasField("end_monotonic_ns") else None,
        )

    def _decoded(self, message: pb.Snapshot) -> list[SnapshotRow]:
        count = message.count
        names = [name for each in self.functions if (name := each.partition("(")[0].strip()) not in HISTOGRAMS]
        keys = (
            zip(*(values_of(column, count) for column in message.keys), strict=True) if message.keys else [()] * count
        )
        columns = [values_of(column, count) for column in message.values]
        if len(columns) != len(names):
            raise ValueError(f"{len(columns)} columns for {len(names)} functions")
        buckets: list[list[Bucket]] = [[] for _ in range(count)]
        histogram = message.histogram
        positions = struct.unpack(f"<{histogram.count}I", histogram.row)
        counts = struct.unpack(f"<{histogram.count}Q", histogram.counts)
        lows, highs = _bounds(histogram.low, histogram.count), _bounds(histogram.high, histogram.count)
        for position, low, high, number in zip(positions, lows, highs, counts, strict=True):
            buckets[position].append(Bucket(low, high, number))
        rows = zip(*columns, strict=True) if columns else [()] * count
        return [
            SnapshotRow(key, dict(zip(names, row, strict=True)), tuple(of_row))
            for key, row, of_row in zip(keys, rows, buckets, strict=True)
        ]


def _bounds(column: pb.Column, count: int) -> Sequence[int | None]:
    if not count:
        return ()
    return [value if value is None else int(value) for value in values_of(column, count)]
