"""Pair starts and ends among events, where no engine does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

import numpy as np

from stapsdtd.aggregate.aggregation import HitField, KeySource
from stapsdtd.events.batch import EventBatch, ValueTable, unite
from stapsdtd.events.columns import I64, Bools, Numbers, Strings, ValueColumn
from stapsdtd.model import BuiltIn, Capture, SiteCapture, StartArgument
from stapsdtd.spans.span import MOST_TOLD, OpenSpan, OpenSpans, Span, SpanCounts, Thread

_Value = int | float | bytes | None
_Values = tuple[_Value, ...]


_STARTS_PER_TURN = 8192
_START_BYTES = 512
"""Of Python's objects, about."""


@dataclass(frozen=True, slots=True)
class _Start:
    """values: those of `Span.start_captures`. layout: of the columns that they were in. is_wanted: whether its pair is;
    is_undecided: there was no telling. nbytes: of memory, about.
    """

    time_ns: int
    thread: Thread
    values: _Values
    layout: tuple[str, ...]
    is_wanted: bool
    is_undecided: bool

    @property
    def nbytes(self) -> int:
        return _START_BYTES + _text_bytes(self.values)


@dataclass(frozen=True, slots=True)
class Paired:
    """pairs: events of the ends. unread: hits whose key, or site, is unknown. unwanted: how many pairs were left out
    because of their starts; in counts they are paired. undecided: of how many of these there was no telling.
    """

    pairs: EventBatch
    counts: SpanCounts
    unread: int
    unwanted: int
    undecided: int


class Pairer:
    """Takes the hits of one subscription, and returns pairs. Any thread may call it."""

    def __init__(self, span: Span, max_bytes: int) -> None:
        """max_bytes: of the starts that wait, about."""
        self._span = span
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._open: dict[_Values, list[_Start]] = {}
        self._unkept: dict[_Values, int] = {}
        """How many starts began within the last one that waits, and are not kept: as many ends are theirs."""

    def add(
        self,
        batch: EventBatch,
        sites: Mapping[int, SiteCapture],
        wanted: Bools | None = None,
        undecided: Bools | None = None,
    ) -> Paired:
        """Take hits, in the order of time, whose values are those of `Span.at_hit`.

        sites: by id. wanted: of starts, whether their pairs are; None if all are. undecided: which of the others are
        not since there was no telling; None if none.
        """
        if wanted is None:
            wanted = np.ones(len(batch), np.bool_)
        if undecided is None:
            undecided = np.zeros(len(batch), np.bool_)
        keys, starts = self._hits(batch, sites, wanted, undecided)
        counts: Counter[str] = Counter()
        ends: list[int] = []
        their_starts: list[_Start] = []
        left_out: list[_Start] = []
        times = batch.time_ns.tolist()
        with self._lock:
            for row, (key, start) in enumerate(zip(keys, starts, strict=True)):
                if key is None:
                    continue
                if start is not None:
                    self._begin(key, start, counts)
                elif found := self._end(key, times[row], counts):
                    if not found.is_wanted:
                        left_out.append(found)
                        continue
                    ends.append(row)
                    their_starts.append(found)
        pairs = self._pairs(batch.take(np.array(ends, np.intp)), their_starts, sites)
        not_told = sum(start.is_undecided for start in left_out)
        return Paired(pairs, SpanCounts(**counts), keys.count(None), len(left_out), not_told)

    def _begin(self, key: _Values, start: _Start, counts: Counter[str]) -> None:
        counts["starts"] += 1
        waiting = self._open.get(key, [])
        if waiting and self._is_late(waiting[-1], start.time_ns):
            counts["timed_out"] += len(waiting)
            self._drop(key, waiting)
            waiting = []
        if waiting and self._span.takes_latest:
            counts["nested"] += 1
            self._drop(key, waiting)
            waiting = []
        if len(waiting) >= self._span.most_waiting or key in self._unkept:
            counts["nested"] += 1
            self._leave_out(key)
            return
        nbytes = start.nbytes + _text_bytes(key)
        is_full = not waiting and len(self._open) >= self._span.max_open
        if is_full or self._bytes + nbytes > self._max_bytes:
            counts["table_full"] += 1
            if waiting:
                self._leave_out(key)
            return
        self._bytes += nbytes
        self._open.setdefault(key, []).append(start)

    def _leave_out(self, key: _Values) -> None:
        """Remember that an end is to come that is not the end of the last start that waits."""
        if self._span.most_waiting > 1:
            self._unkept[key] = self._unkept.get(key, 0) + 1

    def _end(self, key: _Values, time_ns: int, counts: Counter[str]) -> _Start | None:
        if unkept := self._unkept.get(key):
            counts["unmatched"] += 1
            self._unkept[key] = unkept - 1
            if unkept == 1:
                del self._unkept[key]
            return None
        waiting = self._open.get(key)
        start = waiting[-1] if waiting else None
        if start is not None:
            self._drop(key, [start])
        if start is None or self._is_late(start, time_ns):
            counts["timed_out"] += start is not None
            counts["unmatched"] += 1
            return None
        counts["paired"] += 1
        return start

    def _drop(self, key: _Values, dropped: Sequence[_Start]) -> None:
        """Remove starts that have this key."""
        left = [start for start in self._open[key] if start not in dropped]
        self._bytes -= sum(start.nbytes + _text_bytes(key) for start in dropped)
        if left:
            self._open[key] = left
        else:
            del self._open[key]
            self._unkept.pop(key, None)

    def _is_late(self, start: _Start, now_ns: int) -> bool:
        return 0 < self._span.timeout_ns < now_ns - start.time_ns

    def waiting(self) -> Generator[None, None, set[Thread]]:
        """Return, in steps, the threads whose end would end spans."""
        threads: set[Thread] = set()
        if self._span.is_of_thread:
            for some in self._in_turns():
                threads.update(start.thread for _, start in some)
                yield
        return threads

    def _in_turns(self) -> Iterator[list[tuple[_Values, _Start]]]:
        """Yield the starts that wait, some at a time, so that those who add hits do not wait for the lock."""
        for keys in self._some_keys():
            with self._lock:
                some = [(key, start) for key in keys for start in self._open.get(key, ())]
            yield some

    def _some_keys(self) -> Iterator[list[_Values]]:
        with self._lock:
            keys = list(self._open)
        # each may have as many starts
        count = max(_STARTS_PER_TURN // self._span.most_waiting, 1)
        for first in range(0, len(keys), count):
            yield keys[first : first + count]

    def open_spans(self) -> Generator[None, None, OpenSpans]:
        """Return, in steps, the starts that wait."""
        oldest: list[tuple[_Values, _Start]] = []
        count = 0
        for some in self._in_turns():
            wanted = [each for each in some if each[1].is_wanted]
            count += len(wanted)
            oldest = nsmallest(MOST_TOLD, oldest + wanted, key=lambda each: each[1].time_ns)
            yield
        is_thread = self._span.key == (HitField.TID,)
        told = (OpenSpan(start.time_ns, start.thread, () if is_thread else key, start.values) for key, start in oldest)
        return OpenSpans(tuple(told), count)

    def has_late(self, now_ns: int) -> Generator[None, None, bool]:
        """Report, in steps, whether a start has waited for too long."""
        for some in self._in_turns() if self._span.timeout_ns else ():
            if any(self._is_late(start, now_ns) for _, start in some):
                return True
            yield
        return False

    def end_of_threads(self, ended: Iterable[Thread]) -> Generator[None, None, SpanCounts]:
        """Remove, in steps, starts of threads that have ended, all of whose hits were added."""
        threads = set(ended)
        died = (yield from self._remove(lambda start: start.thread in threads)) if threads else 0
        return SpanCounts(died=died)

    def expire(self, now_ns: int) -> Generator[None, None, SpanCounts]:
        """Remove, in steps, starts that have waited for too long."""
        late = (yield from self._remove(lambda start: self._is_late(start, now_ns))) if self._span.timeout_ns else 0
        return SpanCounts(timed_out=late)

    def _remove(self, is_over: Callable[[_Start], bool]) -> Generator[None, None, int]:
        removed = 0
        for keys in self._some_keys():
            with self._lock:
                for key in keys:
                    over = [start for start in self._open.get(key, ()) if is_over(start)]
                    removed += len(over)
                    if over:
                        self._drop(key, over)
            yield
        return removed

    def _hits(
        self, batch: EventBatch, sites: Mapping[int, SiteCapture], wanted: Bools, undecided: Bools
    ) -> tuple[list[_Values | None], list[_Start | None]]:
        """Return each event's key, None if it is unknown, and what is to be kept of it, None if it is an end."""
        keys: list[_Values | None] = [None] * len(batch)
        starts: list[_Start | None] = [None] * len(batch)
        for site_id, positions, events in batch.by_site():
            site = sites.get(site_id)
            if site is None:
                continue
            columns = dict(zip(self._span.at_hit(site).captures, events.tables[0].columns, strict=True))
            rows = positions.tolist()
            for row, key in zip(
                rows, zip(*(_key(part, events, columns) for part in self._span.key), strict=True), strict=True
            ):
                keys[row] = None if None in key else key
            if site.is_start:
                of_site = self._starts(events, columns, wanted[positions], undecided[positions])
                for row, start in zip(rows, of_site, strict=True):
                    starts[row] = start
        return keys, starts

    def _starts(
        self, events: EventBatch, columns: Mapping[Capture, ValueColumn], wanted: Bools, undecided: Bools
    ) -> list[_Start]:
        kept = [columns[capture] for capture in self._span.start_captures]
        layout = tuple(column.layout for column in kept)
        values = zip(*map(values_of, kept), strict=True) if kept else [()] * len(events)
        threads = map(Thread, events.pid.tolist(), events.tid.tolist())
        judged = wanted.tolist(), undecided.tolist()
        return [
            _Start(time_ns, thread, of_start, layout, is_wanted, is_undecided)
            for time_ns, thread, of_start, is_wanted, is_undecided in zip(
                events.time_ns.tolist(), threads, values, *judged, strict=True
            )
        ]

    def _pairs(self, ends: EventBatch, starts: Sequence[_Start], sites: Mapping[int, SiteCapture]) -> EventBatch:
        """Return events of ends, with the values of their pairs."""
        tables: list[ValueTable] = []
        for site_id, positions, events in ends.by_site():
            site = sites[site_id]
            columns = dict(zip(self._span.at_hit(site).captures, events.tables[0].columns, strict=True))
            of_layout: dict[tuple[str, ...], list[int]] = {}
            for number, row in enumerate(positions.tolist()):
                of_layout.setdefault(starts[row].layout, []).append(number)
            for layout, numbers in of_layout.items():
                rows = np.array(numbers, np.intp)
                of_rows = [starts[row] for row in positions[rows].tolist()]
                pairs = _PairColumns(self._span, layout, of_rows, events.time_ns[rows])
                taken = {capture: column.take(rows) for capture, column in columns.items()}
                tables.append(
                    ValueTable(tuple(pairs.column(each) or taken[each] for each in site.captures), positions[rows])
                )
        return replace(ends, tables=unite(tables))


@dataclass(frozen=True, slots=True)
class _PairColumns:
    """Columns of pairs whose starts' values have the same types. times: of the ends."""

    span: Span
    layout: tuple[str, ...]
    starts: Sequence[_Start]
    times: I64

    def column(self, capture: Capture) -> ValueColumn | None:
        """Return what is captured, or None if it is of the end."""
        if capture.subject is BuiltIn.ELAPSED:
            return Numbers(self.times - np.array([start.time_ns for start in self.starts], np.int64))
        if not isinstance(capture.subject, StartArgument):
            return None
        position = self.span.start_captures.index(replace(capture, subject=capture.subject.index))
        return column_of(self.layout[position], [start.values[position] for start in self.starts])


def _key(part: KeySource, events: EventBatch, columns: Mapping[Capture, ValueColumn]) -> list[_Value]:
    if isinstance(part, Capture):
        return values_of(columns[part])
    match part:
        case HitField.PID:
            return list(events.pid.tolist())
        case HitField.TID:
            return list(events.tid.tolist())
        case HitField.CPU:
            return list(events.cpu.tolist())
        case HitField.EXECNAME:
            return list(events.comm.tolist())
        case _:
            raise ValueError(f"{part.value} is no key of a span")


def _text_bytes(values: _Values) -> int:
    return sum(len(value) for value in values if isinstance(value, bytes))


def values_of(column: ValueColumn) -> list[_Value]:
    """Return a column's values, None for those that are unavailable."""
    if isinstance(column, Strings):
        return list(column.tolist())
    values: list[_Value] = list(column.data.tolist())
    if column.unavailable is not None:
        for row in np.flatnonzero(column.unavailable).tolist():
            values[row] = None
    return values


def column_of(layout: str, values: Sequence[_Value]) -> ValueColumn:
    """Return a column of values, which were in one of this layout."""
    missing = np.array([value is None for value in values], np.bool_)
    unavailable = missing if missing.any() else None
    numbers = [0 if value is None or isinstance(value, bytes) else value for value in values]
    match layout:
        case "signed":
            return Numbers(np.array(numbers, np.int64), unavailable)
        case "unsigned":
            return Numbers(np.array(numbers, np.uint64), unavailable)
        case "float":
            return Numbers(np.array(numbers, np.float64), unavailable)
        case _:
            texts = [value if isinstance(value, bytes) else None for value in values]
            return replace(Strings.of(texts), is_raw=layout == "bytes")
