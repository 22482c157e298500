"""Pairs of starts and ends, against a model that takes one hit at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.aggregate.aggregation import HitField
from stapsdtd.events.batch import EventBatch, ValueTable, join
from stapsdtd.events.columns import Numbers, Strings, ValueColumn
from stapsdtd.kernel import procfs
from stapsdtd.model import BuiltIn, Capture, SiteCapture, StartArgument
from stapsdtd.runtime.fair_thread import finish
from stapsdtd.sessions.pairing import Pairing
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.sessions.sweeping import EndedThreads
from stapsdtd.spans.pairing import Pairer
from stapsdtd.spans.span import OpenSpan, OpenSpans, Span, SpanCounts, Thread
from tests.unit.samples import argument, sample_object, site, value_list

KEY, TEXT = Capture(0), Capture(1, is_string=True)
ELAPSED = Capture(BuiltIn.ELAPSED)
OF_START = Capture(StartArgument(1), is_string=True)
BEGIN = SiteCapture(site("begin", 1, [argument()] * 2), (TEXT,), is_start=True)
END = SiteCapture(site("end", 2, [argument()] * 2), (Capture(1), OF_START, ELAPSED))
OTHER_END = SiteCapture(site("stop", 3, [argument(), argument(signed=True)]), (Capture(1), OF_START, ELAPSED))
ROOM = 1 << 20
SITES = {1: BEGIN, 2: END, 3: OTHER_END}

KNOWN = {site_id: KnownSite(sample_object(each.site), each, lambda *_: None) for site_id, each in SITES.items()}


@dataclass(frozen=True)
class Hit:
    site_id: int
    key: int | None
    time_ns: int
    tid: int = 1

    @property
    def value(self) -> int:
        """Which differs for all hits of a test."""
        return self.time_ns


DEPTH = 3
"""For a test of few hits."""


@dataclass
class Model:
    """What the documentation says, literally."""

    span: Span
    waiting: dict[tuple[int | None, ...], list[Hit]] = field(default_factory=dict)
    unkept: dict[tuple[int | None, ...], int] = field(default_factory=dict)
    counts: SpanCounts = field(default_factory=SpanCounts)
    unread: int = 0
    unwanted: int = 0
    undecided: int = 0
    pairs: list[tuple[int, int, bytes, int]] = field(default_factory=list)

    def take(self, hit: Hit) -> None:
        if hit.key is None and KEY in self.span.key:
            self.unread += 1
            return
        key = (hit.key if KEY in self.span.key else None, hit.tid if HitField.TID in self.span.key else None)
        starts = self.waiting.get(key, [])
        if hit.site_id == 1:
            self.counts += self.begin(key, starts, hit)
        else:
            self.counts += self.end(key, starts, hit)
        if not self.waiting.get(key):
            self.waiting.pop(key, None)
            self.unkept.pop(key, None)

    def is_late(self, start: Hit, now_ns: int) -> bool:
        return self.span.timeout_ns > 0 and now_ns - start.time_ns > self.span.timeout_ns

    def begin(self, key: tuple[int | None, ...], starts: list[Hit], hit: Hit) -> SpanCounts:
        if starts and self.is_late(starts[-1], hit.time_ns):
            late = len(starts)
            self.waiting[key] = [hit]
            self.unkept.pop(key, None)
            return SpanCounts(starts=1, timed_out=late)
        if starts and self.span.takes_latest:
            self.waiting[key] = [hit]
            return SpanCounts(starts=1, nested=1)
        if len(starts) == (DEPTH if self.span.is_nested else 1) or self.unkept.get(key):
            if self.span.is_nested:
                self.unkept[key] = self.unkept.get(key, 0) + 1
            return SpanCounts(starts=1, nested=1)
        if not starts and len(self.waiting) == self.span.max_open:
            return SpanCounts(starts=1, table_full=1)
        self.waiting[key] = [*starts, hit]
        return SpanCounts(starts=1)

    def end(self, key: tuple[int | None, ...], starts: list[Hit], hit: Hit) -> SpanCounts:
        if self.unkept.get(key):
            self.unkept[key] -= 1
            return SpanCounts(unmatched=1)
        if not starts:
            return SpanCounts(unmatched=1)
        start = starts[-1]
        self.waiting[key] = starts[:-1]
        if self.is_late(start, hit.time_ns):
            return SpanCounts(unmatched=1, timed_out=1)
        if not is_wanted(start):
            self.unwanted += 1
            self.undecided += is_undecided(start)
            return SpanCounts(paired=1)
        self.pairs.append((hit.site_id, hit.value, text_of(start), hit.time_ns - start.time_ns))
        return SpanCounts(paired=1)


def is_wanted(start: Hit) -> bool:
    return start.value % 4 > 0


def is_undecided(start: Hit) -> bool:
    return start.value % 8 == 0


def text_of(hit: Hit) -> bytes:
    return b"work %d" % hit.value


def events(hits: Sequence[Hit], *, has_key: bool) -> EventBatch:
    """As engines deliver them: sites whose values have the same types share a table."""
    tables = []
    for site_id in SITES:
        rows = [row for row, hit in enumerate(hits) if hit.site_id == site_id]
        own: ValueColumn
        if site_id == 1:
            own = Strings.of([text_of(hits[row]) for row in rows])
        else:
            own = (unsigned_column if site_id == 2 else signed_column)([hits[row].value for row in rows])
        keys = [hits[row].key for row in rows]
        columns = (unsigned_column(keys), own) if has_key else (own,)
        if rows:
            tables.append(ValueTable(columns, np.array(rows, np.intp)))
    count = len(hits)
    return EventBatch(
        np.array([hit.time_ns for hit in hits], np.int64),
        np.full(count, 7, np.int32),
        np.array([hit.tid for hit in hits], np.int32),
        np.zeros(count, np.uint16),
        np.full(count, b"app", "S16"),
        np.array([hit.site_id for hit in hits], np.uint32),
        tuple(tables),
    )


def unsigned_column(values: Sequence[int | None]) -> Numbers:
    missing = np.array([value is None for value in values], np.bool_)
    data = np.array([value or 0 for value in values], np.uint64)
    return Numbers(data, missing if missing.any() else None)


def signed_column(values: Sequence[int | None]) -> Numbers:
    return Numbers(np.array([value or 0 for value in values], np.int64))


def rows_of(pairs: EventBatch) -> list[tuple[object, ...]]:
    rows: dict[int, tuple[object, ...]] = {}
    for site_id, positions, part in pairs.by_site():
        columns = [value_list(column) for column in part.tables[0].columns]
        for position, values in zip(positions.tolist(), zip(*columns, strict=True), strict=True):
            rows[position] = (site_id, *values)
    return [rows[position] for position in sorted(rows)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Span, list[list[Hit]]]:
    is_nested, takes_latest = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    span = Span(
        draw(st.sampled_from([(HitField.TID,), (KEY,), (KEY, HitField.TID)])),
        (TEXT,),
        timeout_ns=draw(st.sampled_from([0, 3, 20])),
        is_nested=is_nested,
        max_open=draw(st.integers(1, 4)),
        takes_latest=takes_latest,
    )
    times = sorted(draw(st.sets(st.integers(1, 200), max_size=60)))
    hits = [
        Hit(draw(st.sampled_from([1, 1, 2, 3])), draw(st.none() | st.integers(1, 3)), time_ns, draw(st.integers(1, 2)))
        for time_ns in times
    ]
    cut = draw(st.integers(0, len(hits)))
    return span, [part for part in (hits[:cut], hits[cut:]) if part]


@given(cases())
def test_pairs_are_those_of_the_model(case: tuple[Span, list[list[Hit]]]) -> None:
    span, parts = case
    pairer, model, counts = Pairer(span, ROOM), Model(span), SpanCounts()
    unread = unwanted = not_told = 0
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stapsdtd.spans.span.MAX_DEPTH", DEPTH)
        for hits in parts:
            wanted = np.array([is_wanted(hit) for hit in hits], np.bool_)
            undecided = np.array([is_undecided(hit) for hit in hits], np.bool_)
            paired = pairer.add(events(hits, has_key=KEY in span.key), SITES, wanted, undecided)
            counts += paired.counts
            unread += paired.unread
            unwanted += paired.unwanted
            not_told += paired.undecided
            made += rows_of(paired.pairs)
            for hit in hits:
                model.take(hit)
    assert made == model.pairs
    assert (counts, unread, unwanted) == (model.counts, model.unread, model.unwanted)
    assert not_told == model.undecided
    assert counts.open == sum(map(len, model.waiting.values()))


def test_hits_of_sites_that_are_forgotten_are_counted() -> None:
    paired = Pairer(Span(), ROOM).add(events([Hit(1, 1, 1), Hit(2, 1, 2)], has_key=False), {})
    assert (len(paired.pairs), paired.unread, paired.counts) == (0, 2, SpanCounts())


def test_starts_of_threads_that_ended() -> None:
    pairer = Pairer(Span(start_captures=(TEXT,)), ROOM)
    pairer.add(events([Hit(1, 1, 1, tid=4), Hit(1, 1, 2, tid=5)], has_key=False), SITES)
    assert finish(pairer.waiting()) == {Thread(7, 4), Thread(7, 5)}
    assert finish(pairer.end_of_threads([Thread(7, 5), Thread(8, 4)])) == SpanCounts(died=1)
    assert finish(pairer.waiting()) == {Thread(7, 4)}


def test_what_is_open() -> None:
    pairer = Pairer(Span(start_captures=(TEXT,), is_nested=True), ROOM)
    hits = [Hit(1, 1, 5, tid=4), Hit(1, 1, 2, tid=5), Hit(1, 1, 8, tid=5), Hit(1, 1, 3, tid=6), Hit(2, 1, 9, tid=6)]
    wanted = np.array([True, True, False, True, True])
    pairer.add(events(sorted(hits, key=lambda hit: hit.time_ns), has_key=False), SITES, wanted[[1, 3, 0, 2, 4]])
    expected = (OpenSpan(2, Thread(7, 5), (), (b"work 2",)), OpenSpan(5, Thread(7, 4), (), (b"work 5",)))
    assert finish(pairer.open_spans()) == OpenSpans(expected, 2)
    by_key = Pairer(Span(key=(KEY,), start_captures=(TEXT,)), ROOM)
    by_key.add(events([Hit(1, number, number) for number in range(1, 151)], has_key=True), SITES)
    told = finish(by_key.open_spans())
    assert (told.count, len(told.oldest)) == (150, 100)
    assert told.oldest[99] == OpenSpan(100, Thread(7, 1), (100,), (b"work 100",))


def test_threads_do_not_matter_to_keys_without_them() -> None:
    pairer = Pairer(Span(key=(KEY,), start_captures=(TEXT,)), ROOM)
    pairer.add(events([Hit(1, 1, 1)], has_key=True), SITES)
    assert finish(pairer.waiting()) == set()


def test_starts_that_wait_for_too_long() -> None:
    pairer = Pairer(Span(start_captures=(TEXT,), timeout_ns=10), ROOM)
    pairer.add(events([Hit(1, 1, 1, tid=4), Hit(1, 1, 5, tid=5)], has_key=False), SITES)
    assert not finish(pairer.has_late(11))
    assert finish(pairer.has_late(12))
    assert finish(pairer.expire(12)) == SpanCounts(timed_out=1)
    assert finish(pairer.waiting()) == {Thread(7, 5)}


def test_pairs_of_several_batches_are_in_the_order_of_their_ends() -> None:
    pairer = Pairer(Span(start_captures=(TEXT,)), ROOM)
    first = pairer.add(events([Hit(1, 1, 1, tid=1), Hit(1, 1, 2, tid=2)], has_key=False), SITES)
    later = events([Hit(3, 1, 3, tid=2), Hit(2, 1, 4, tid=1)], has_key=False)
    second = pairer.add(later, SITES)
    assert rows_of(join([first.pairs, second.pairs])) == [(3, 3, b"work 2", 1), (2, 4, b"work 1", 3)]


def test_starts_take_no_more_memory_than_they_may() -> None:
    """Each of these takes some 600 bytes, its text included."""
    pairer = Pairer(Span(key=(HitField.TID,), start_captures=(TEXT,), max_open=100), max_bytes=2000)
    for _ in range(3):
        first = pairer.add(events([Hit(1, 1, time, tid=time) for time in range(1, 11)], has_key=False), SITES)
        assert first.counts == SpanCounts(starts=10, table_full=7)
        ends = pairer.add(events([Hit(2, 1, 20, tid=tid) for tid in (1, 2)], has_key=False), SITES)
        assert ends.counts == SpanCounts(paired=2)
        assert finish(pairer.end_of_threads([Thread(7, 3)])) == SpanCounts(died=1)


def test_threads_of_very_many_processes_are_looked_at_by_and_by() -> None:
    spans = Pairing(
        Span(start_captures=(TEXT,)),
        lambda ids: {each: KNOWN[each] for each in ids},
        lambda wanted: wanted,
        ROOM,
    )
    dead = [4_000_001, 4_000_002, 4_000_003]
    hits = events([Hit(1, 1, number + 1, tid=pid) for number, pid in enumerate(dead)], has_key=False)
    spans.add(replace(hits, pid=hits.tid))
    ended = EndedThreads(max_looks=2)
    found = [finish(ended.of([spans]))[0] for _ in range(3)]
    assert all(len(each) == 2 for each in found)
    assert {thread.pid for each in found[:2] for thread in each} == set(dead)


def test_process_is_looked_at_once_for_all_clauses(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[int]()

    def thread_ids(pid: int) -> list[int]:
        looked_at.append(pid)
        return [4]

    monkeypatch.setattr(procfs, "thread_ids", thread_ids)
    of_clauses = []
    for _ in range(32):
        spans = Pairing(
            Span(start_captures=(TEXT,)), lambda ids: {each: KNOWN[each] for each in ids}, lambda wanted: wanted, ROOM
        )
        spans.add(events([Hit(1, 1, 1, tid=4), Hit(1, 1, 2, tid=5)], has_key=False))
        of_clauses.append(spans)
    assert finish(EndedThreads().of(of_clauses)) == [{Thread(7, 5)}] * 32
    assert looked_at == [7]


def test_starts_are_looked_through_in_steps() -> None:
    pairer = Pairer(Span(start_captures=(TEXT,), max_open=100_000, timeout_ns=1), 1 << 30)
    for first in range(0, 100_000, 10_000):
        hits = [Hit(1, 1, number + 1, tid=number) for number in range(first, first + 10_000)]
        pairer.add(events(hits, has_key=False), SITES)

    def steps_of(steps: Generator[None, None, object]) -> int:
        return sum(1 for _ in steps)

    assert steps_of(pairer.waiting()) > 10
    assert steps_of(pairer.open_spans()) > 10
    assert steps_of(pairer.end_of_threads([Thread(7, 1)])) > 10
    assert steps_of(pairer.expire(1)) > 10
