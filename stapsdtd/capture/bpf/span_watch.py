"""Tells what becomes of starts without an end: of those whose threads ended, and of those that wait for too long."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection

import numpy as np

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.bpf.span_tables import SpanTable, SpanTables
from stapsdtd.kernel import procfs
from stapsdtd.kernel.bpf_entries import EntryMap
from stapsdtd.spans.span import SpanCounts

_log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_TIME = ~layout.UNWANTED_START & (1 << 64) - 1
"""Of the first word of what is kept of a start."""
_TID = slice(20, 24) if sys.byteorder == "little" else slice(16, 20)
"""In the key of a call; see make_call_key() in bpf/start.h."""


class SpanWatch:
    """Any thread may use it."""

    def __init__(
        self,
        tables: SpanTables,
        post: Callable[[Callable[[], None]], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """post: as `Reader.post_behind_counters`. now_ns: as hits have it. clock: in seconds."""
        self._tables = tables
        self._post = post
        self._now_ns = now_ns
        self._clock = clock
        self._swept_at = clock()

    @property
    def is_needed(self) -> bool:
        return bool(self._tables.all())

    def look(self) -> None:
        """Tell of all subscriptions' starts, and remove tables that nobody uses any more."""
        now = self._clock()
        is_due = now - self._swept_at > _SWEEP_SECONDS
        if is_due:
            self._swept_at = now
        for table in self._tables.all():
            self._tell(table, is_swept=is_due)
        self._tables.remove_unused()

    def look_last(self, channels: Collection[Channel]) -> None:
        """Tell of starts of subscriptions whose last hit is over."""
        for table in self._tables.of(channels):
            self._tell(table, is_swept=table.span.is_of_calls)

    def finish(self) -> None:
        self._tables.remove_all()

    def _tell(self, table: SpanTable, *, is_swept: bool) -> None:
        # until it is posted, so that nobody closes the subscription in between
        with table.lock:
            counts = Counter(died=self._tables.take_died(table))
            if is_swept and not table.is_removed and table.entries is not None:
                try:
                    self._sweep(table, table.entries, counts)
                except OSError:
                    _log.exception("starts that wait for too long could not be looked for, which is tried again")
            if counts.total():
                told = SpanCounts(**counts)
                self._post(lambda: table.channel.spanned(told))

    def _sweep(self, table: SpanTable, entries: EntryMap, counts: Counter[str]) -> None:
        if table.span.is_of_calls:
            _take_dead_calls(entries, counts)
        if table.span.timeout_ns:
            self._take_late(table, entries, counts)

    def _take_late(self, table: SpanTable, waiting: EntryMap, counts: Counter[str]) -> None:
        """Take out starts that have waited for too long."""
        earliest_ns = self._now_ns() - table.span.timeout_ns
        keys, entries = waiting.look_up_all()
        if not len(keys):
            return
        late = entries.view(np.uint64)[:, 0] & np.uint64(_TIME) < earliest_ns
        for key in keys[late]:
            entry = waiting.take(key.tobytes())
            if entry is None:
                continue
            begun_ns = int.from_bytes(entry[:8], sys.byteorder) & _TIME
            # in the meantime another start may have come, to which an end in these microseconds does not belong
            if begun_ns < earliest_ns:
                counts["timed_out"] += 1
                continue
            try:
                counts["nested"] += not waiting.put(key.tobytes(), entry)
            except OSError:
                # others have taken its place
                counts["table_full"] += 1


def _take_dead_calls(waiting: EntryMap, counts: Counter[str]) -> None:
    """Take out what threads were in when they ended, which never returns."""
    by_thread: defaultdict[int, list[bytes]] = defaultdict(list)
    for key in waiting.all_keys():
        by_thread[int.from_bytes(key[_TID], sys.byteorder)].append(key)
    for tid, keys in by_thread.items():
        stat = procfs.stat(tid)
        # idle CPUs' tasks are 0, and nowhere in /proc
        if tid and (stat is None or stat.state in procfs.DEAD):
            counts["died"] += sum(waiting.take(key) is not None for key in keys)
