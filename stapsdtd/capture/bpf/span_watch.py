"""Tells what becomes of starts without an end: of those whose threads ended, and of those that wait for too long."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.bpf.span_tables import SpanTable, SpanTables
from stapsdtd.spans.span import SpanCounts

_log = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0


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
            self._tell(table, is_swept=is_due and table.span.timeout_ns > 0)
        self._tables.remove_unused()

    def look_last(self, channels: Collection[Channel]) -> None:
        """Tell of starts of subscriptions whose last hit is over."""
        for table in self._tables.of(channels):
            self._tell(table, is_swept=False)

    def finish(self) -> None:
        self._tables.remove_all()

    def _tell(self, table: SpanTable, *, is_swept: bool) -> None:
        # until it is posted, so that nobody closes the subscription in between
        with table.lock:
            counts = Counter(died=self._tables.take_died(table))
            if is_swept and not table.is_removed:
                try:
                    self._sweep(table, counts)
                except OSError:
                    _log.exception("starts that wait for too long could not be looked for, which is tried again")
            if counts.total():
                told = SpanCounts(**counts)
                self._post(lambda: table.channel.spanned(told))

    def _sweep(self, table: SpanTable, counts: Counter[str]) -> None:
        """Take out starts that have waited for too long."""
        earliest_ns = self._now_ns() - table.span.timeout_ns
        keys, entries = table.entries.look_up_all()
        if not len(keys):
            return
        late = entries.view(np.int64)[:, 0] < earliest_ns
        for key in keys[late]:
            entry = table.entries.take(key.tobytes())
            if entry is None:
                continue
            begun_ns = int.from_bytes(entry[:8], sys.byteorder)
            # in the meantime another start may have come, to which an end in these microseconds does not belong
            if begun_ns < earliest_ns:
                counts["timed_out"] += 1
                continue
            try:
                counts["nested"] += not table.entries.put(key.tobytes(), entry)
            except OSError:
                # others have taken its place
                counts["table_full"] += 1
