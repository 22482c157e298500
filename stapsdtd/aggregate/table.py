"""The rows of one aggregation, from the engine's hits to the client's snapshots."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import Aggregation, Key, Row

_ROW_BYTES = 512
_BUCKET_BYTES = 128
"""Of Python's objects, about."""
_MAX_KEPT = 256


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The rows of an interval, or since the beginning.

    number: counts from 1. begin_ns, end_ns: of what it covers, CLOCK_MONOTONIC. hits: in this and all before it;
    valueless: those that have no value, though functions need one. is_final: nothing comes after it.
    """

    number: int
    begin_ns: int
    end_ns: int
    rows: Mapping[Key, Row]
    hits: int = 0
    valueless: int = 0
    is_final: bool = False


class Table:
    """Filled by the engine's reader thread, and read by the API's."""

    def __init__(self, aggregation: Aggregation, now_ns: int, max_bytes: int) -> None:
        """max_bytes: of the rows that no snapshot has yet, or of all if snapshots are cumulative, about. Snapshots that
        are kept for a client that lost its connection may take as much again.
        """
        self._aggregation = aggregation
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._rows: dict[Key, Row] = {}
        # those of the rows that no snapshot has: others are copied before they change
        self._own: set[Key] = set()
        self._hits = self._valueless = 0
        self._begin_ns = now_ns
        self._kept: deque[tuple[Snapshot, int]] = deque([(Snapshot(0, now_ns, now_ns, {}), 0)], _MAX_KEPT)

    @property
    def hits(self) -> int:
        """The number of hits in all rows so far."""
        return self._hits

    @property
    def valueless(self) -> int:
        """Of these, how many have no value, though functions need one."""
        return self._valueless

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
                if self._aggregation.needs_value:
                    self._valueless += row.count - row.values
                if known is None:
                    self._rows[key] = row
                elif key in self._own:
                    known.add(row)
                else:
                    changed = self._rows[key] = known.copy()
                    changed.add(row)
                self._own.add(key)
        return left_out

    def take(self, now_ns: int, *, is_final: bool = False) -> Snapshot:
        """Return the next snapshot."""
        with self._lock:
            last, nbytes, is_cumulative = self.last, self._bytes, self._aggregation.is_cumulative
            if is_cumulative:
                # which is quick, as events of all users wait for the lock
                rows, begin_ns = self._rows.copy(), self._begin_ns
            else:
                rows, begin_ns = self._rows, last.end_ns
                self._rows, self._bytes = {}, 0
            self._own = set()
            snapshot = Snapshot(last.number + 1, begin_ns, now_ns, rows, self._hits, self._valueless, is_final)
            self._kept.append((snapshot, _ROW_BYTES + nbytes))
            # never empty, for those who ask for the last one meanwhile
            while len(self._kept) > 1 and (is_cumulative or sum(size for _, size in self._kept) > self._max_bytes):
                self._kept.popleft()
            return snapshot

    @property
    def last(self) -> Snapshot:
        """The snapshot that was taken last; its number is 0 if none was."""
        return self._kept[-1][0]

    def taken_from(self, number: int) -> list[Snapshot]:
        """Return the snapshots with this number and greater ones that are kept, for a client that may lack them."""
        with self._lock:
            return [snapshot for snapshot, _ in self._kept if snapshot.number >= max(number, 1)]


def _bytes_of(key: Key, row: Row) -> int:
    return _ROW_BYTES + sum(len(part) for part in key if isinstance(part, bytes)) + _BUCKET_BYTES * len(row.buckets)


def _more_bytes(row: Row, added: Row) -> int:
    return _BUCKET_BYTES * len(added.buckets.keys() - row.buckets.keys())
