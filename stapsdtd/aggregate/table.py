"""The rows of one aggregation, from the engine's hits to the client's snapshots."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import Aggregation, Key, Row


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

    def __init__(self, aggregation: Aggregation, now_ns: int) -> None:
        self._aggregation = aggregation
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
        """Add what hits add up to. Return how many of them had no room, since their key is new and the table full."""
        left_out = 0
        with self._lock:
            for key, row in rows.items():
                known = self._rows.get(key)
                if known is not None:
                    known.add(row)
                elif len(self._rows) < self._aggregation.max_keys:
                    self._rows[key] = row
                else:
                    left_out += row.count
                    continue
                self._hits += row.count
        return left_out

    def take(self, now_ns: int, *, is_final: bool = False) -> Snapshot:
        """Return the next snapshot, which `again` returns until another one is taken."""
        with self._lock:
            if self._aggregation.is_cumulative:
                rows, begin_ns = copy.deepcopy(self._rows), self._begin_ns
            else:
                rows, begin_ns = self._rows, self._last.end_ns
                self._rows = {}
            self._last = Snapshot(self._last.number + 1, begin_ns, now_ns, rows, self._hits, is_final)
            return self._last

    def again(self) -> Snapshot:
        """Return the snapshot that was taken last, for a client that may lack it; its number is 0 if none was."""
        with self._lock:
            return self._last
