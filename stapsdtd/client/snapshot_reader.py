"""Decodes snapshots, and has those of a cumulative aggregation go on after a restart of the server."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stapsdtd.client import decode, encode, joining
from stapsdtd.client.errors import ProtocolError
from stapsdtd.client.events import values_of
from stapsdtd.client.snapshots import Bucket, Snapshot, SnapshotRow
from stapsdtd.subscribe_options import HISTOGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stapsdtd.client.server import Account
    from stapsdtd.subscribe_options import Aggregate
    from stapsdtd.v1 import stapsdt_pb2 as pb


@dataclass(slots=True)
class SnapshotReader:
    """Puts a clause's snapshots together from the messages of a stream, and goes on after a restart of the server.

    aggregate: as in the request.
    """

    aggregate: Aggregate | None
    tag: str = ""
    _rows: list[SnapshotRow] = field(default_factory=list)
    _last: Snapshot | None = None
    _before: Snapshot | None = None

    def restart(self) -> None:
        """Forget the beginning of a snapshot: a new stream sends all of it."""
        self._rows = []

    def begin_again(self, account: Account | None) -> None:
        """Go on from the last snapshot, of a subscription that has ended. account: its final one, if it is known."""
        self.restart()
        if self._last is None:
            return
        known = self._last.account
        if account is not None:
            known = account if self._before is None else self._before.account + account
        # of hits that were in flight it is unknown what became
        self._before = replace(self._last, account=replace(known, fired=known.fired - known.in_flight, in_flight=0))

    def read(self, message: pb.Snapshot) -> Snapshot | None:
        """Return a snapshot with its last message. Raises ProtocolError."""
        snapshot = self._read(message)
        if snapshot is None or self.aggregate is None:
            return snapshot
        if self._before is not None:
            go_on = joining.joined if self.aggregate.cumulative else joining.continued
            snapshot = go_on(self._before, snapshot)
        self._last = snapshot
        asked = self.aggregate.functions
        return snapshot if self._functions == asked else replace(snapshot, rows=joining.without(snapshot.rows, asked))

    @property
    def _functions(self) -> Sequence[str]:
        return () if self.aggregate is None else encode.functions_of(self.aggregate)

    def _read(self, message: pb.Snapshot) -> Snapshot | None:
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
        names = [name for each in self._functions if (name := each.partition("(")[0].strip()) not in HISTOGRAMS]
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
