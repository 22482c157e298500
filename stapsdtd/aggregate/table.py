"""The rows of one aggregation, from the engine's hits to the client's snapshots."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import Aggregation, Key, Row

_ROW_BYTES = 512
_BUCKET_BYTES = 128
"""Of Python's objects, about."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The rows of an interval, or since the beginning.

    number: counts from 1. begin_ns, end_ns: of what it covers, CLOCK_MONOTONIC. hits: in this and all before it.
    is_final: nothing comes after it.
    """

    number: int
    begin_ns: int
    end_ns: int
    rows: Mapping[Key, Row]
    hits: int = 0
    is_final: bool = False


class Table:
    """Filled by the engine's reader thread, and read by the API's."""

    def __init__(self, aggregation: Aggregation, now_ns: int, max_bytes: int) -> None:
        """max_bytes: of the rows that no snapshot has yet, or of all if snapshots are cumulative, about."""
        self._aggregation = aggregation
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._rows: dict[Key, Row] = {}
        self._hits = 0
        self._begin_ns = now_ns
        self._last = Snapshot(0, now_ns, now_ns, {})

    @property
    def hits(self) -> int:
        """The number of hits in all rows so far."""
        return self._hits

    def add(self, rows: Mapping[Key, Row]) -> int:
        """Add what hits add up to. Return how many had no room, since their key or bucket is new and the table full."""
        left_out = 0
        with self._lock:
            for key, row in rows.items():
                known = self._rows.get(key)
                more = _bytes_of(key, row) if known is None else _more_bytes(known, row)
                has_room = not more or self._bytes + more <= self._max_bytes
                if not has_room or (known is None and len(self._rows) >= self._aggregation.max_keys):
                    left_out += row.count
                    continue
                self._bytes += more
                self._hits += row.count
                if known is None:
                    self._rows[key] = row
                else:
                    known.add(row)
        return left_out

    def take(self, now_ns: int, *, is_final: bool = False) -> Snapshot:
        """Return the next snapshot, which `again` returns until another one is taken."""
        with self._lock:
            if self._aggregation.is_cumulative:
                rows, begin_ns = copy.deepcopy(self._rows), self._begin_ns
            else:
                rows, begin_ns = self._rows, self._last.end_ns
                self._rows = {}
                self._bytes = 0
            self._last = Snapshot(self._last.number + 1, begin_ns, now_ns, rows, self._hits, is_final)
            return self._last

    def again(self) -> Snapshot:
        """Return the snapshot that was taken last, for a client that may lack it; its number is 0 if none was."""
        with self._lock:
            return self._last


def _bytes_of(key: Key, row: Row) -> int:
    return _ROW_BYTES + sum(len(part) for part in key if isinstance(part, bytes)) + _BUCKET_BYTES * len(row.buckets)


def _more_bytes(row: Row, added: Row) -> int:
    return _BUCKET_BYTES * len(added.buckets.keys() - row.buckets.keys())
