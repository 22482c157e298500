"""Starts and ends that the kernel pairs: pairs, and what becomes of the others, equal what a program's threads did."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.aggregate.aggregation import Aggregation, Function, HitField, Key, Row
from stapsdtd.aggregate.buckets import POWERS_OF_TWO
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import LossStage, ManyRows, Target, TargetSite
from stapsdtd.capture.names import Owner
from stapsdtd.elf import parse_object
from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import BuiltIn, Capture, Object, ObjectKey, StartArgument
from stapsdtd.query.actions import Action, Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.query.parse import parse
from stapsdtd.spans.span import Span, SpanCounts
from tests.spanning import Spans
from tests.support import wait_for
from tests.unit.samples import event_rows

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

PATIENCE_SECONDS = 60
SITE_ID = 7
NUMBER, THREAD = Capture(0), Capture(1)
ELAPSED = Capture(BuiltIn.ELAPSED)
STARTED, NEGATIVE = Capture(StartArgument(0)), Capture(StartArgument(2))
KEPT = (Capture(0), Capture(2))
COUNT, SUM, MIN, HISTOGRAM = Function.COUNT, Function.SUM, Function.MIN, Function.HISTOGRAM


class SpanSink:
    """values: of each event. counts: what became of starts and ends."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, ...]] = []
        self.rows: dict[Key, Row] = {}
        self.counts = SpanCounts()
        self.fired_count = self.filtered_count = 0
        self.losses: Counter[LossStage] = Counter()

    def deliver(self, batch: EventBatch) -> None:
        self.values += [row[6:] for row in event_rows(batch)]

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        del site_id
        for key, row in rows.items():
            known = self.rows.setdefault(key, row)
            if known is not row:
                known.add(row)

    def aggregated_many(self, rows: ManyRows) -> None:
        for _, part in rows.parts():
            for site_id, of_site in part.items():
                self.aggregated(site_id, of_site)

    def fired(self, count: int) -> None:
        self.fired_count += count

    def filtered(self, count: int, undecided: int = 0) -> None:
        del undecided
        self.filtered_count += count

    def lost(self, stage: LossStage, count: int) -> None:
        self.losses[stage] += count

    def spanned(self, counts: SpanCounts) -> None:
        self.counts += counts

    @property
    def told(self) -> int:
        """How many hits are accounted for."""
        told = len(self.values) + sum(row.count for row in self.rows.values())
        return told + self.filtered_count + self.losses.total() + self.counts.consumed


class Pairing:
    """A bpf engine, whose subscriptions are numbered as they are opened."""

    def __init__(self, engine: BpfEngine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._opened = 0

    def pair(self, span: Span, outcome: Emit | Aggregate, *, where: str = "", swapped: bool = False) -> SpanSink:
        """where: a filter of both. swapped: whether ends begin spans, and the other way round."""
        sink = SpanSink()
        self._opened += 1
        self._engine.open(self._opened, sink, 4096, f"client {self._opened}", sink)
        assert self._engine.why_not_paired(span) is None
        begin, end = ("end", "begin") if swapped else ("begin", "end")
        actions: dict[str, Action] = {end: EndSpan(span, outcome), begin: BeginSpan(span)}
        assert self._engine.arm(self._opened, target(self._path, actions, where)) == []
        return sink

    def emit(self, **captures: Capture) -> SpanSink:
        sink = SpanSink()
        self._opened += 1
        self._engine.open(self._opened, sink, 4096, f"client {self._opened}", sink)
        actions: dict[str, Action] = {name: Emit((capture,)) for name, capture in captures.items()}
        assert self._engine.arm(self._opened, target(self._path, actions)) == []
        return sink

    def collect(self) -> None:
        for subscription_key in range(1, self._opened + 1):
            self._engine.collect(subscription_key).result(PATIENCE_SECONDS)

    def close(self) -> None:
        for each in [self._engine.close(key) for key in range(1, self._opened + 1)]:
            each.result(PATIENCE_SECONDS)
        self._opened = 0
        self._engine.retry_cleanup()
        wait_for(lambda: self.table_bytes == 0, "the tables to be gone")

    @property
    def table_bytes(self) -> int:
        return self._engine.metrics().table_bytes

    @property
    def entries(self) -> list[int]:
        """How many starts wait, by subscription."""
        return [len(table.entries.look_up_all()[0]) for table in self._engine._spans.all() if table.entries]


def target(path: Path, actions: Mapping[str, Action], where: str = "") -> Target:
    with open(path, "rb") as file:
        parsed = parse_object(file)
        status = os.fstat(file.fileno())
    key = ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    predicate = parse(where, lambda _: None) if where else None
    sites = {site.name: site for site in parsed.sites}
    wanted = tuple(TargetSite(sites[name], SITE_ID, action, predicate=predicate) for name, action in actions.items())
    return Target(Object(key, str(path), parsed), str(path), wanted)


@pytest.fixture
def spans(tmp_path: Path) -> Iterator[Spans]:
    with Spans(tmp_path) as spans:
        yield spans


@pytest.fixture
def pairing(spans: Spans) -> Iterator[Pairing]:
    paging = Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    engine = BpfEngine(Tracefs.locate(), Owner.this_process(), Loaded(), paging)
    try:
        yield Pairing(engine, spans.path)
    finally:
        engine.shutdown()


def test_pairs_of_threads(pairing: Pairing, spans: Spans) -> None:
    count, threads = 2000, 8
    sink = pairing.pair(Span(start_captures=KEPT), Emit((NUMBER, THREAD, STARTED, NEGATIVE, ELAPSED)))
    took_ns = spans.do("pair", count, threads)
    pairing.collect()
    assert pairing.entries == [0]
    pairing.close()
    assert sorted(values[:-1] for values in sink.values) == sorted(
        (number, thread, number, -number) for number in range(count) for thread in range(threads)
    )
    assert 0 < sum(values[-1] for values in sink.values) < took_ns
    assert sink.counts == SpanCounts(starts=count * threads, paired=count * threads)
    assert sink.fired_count == sink.told == 2 * count * threads
    assert sink.losses == {}


@pytest.mark.parametrize("key", [(HitField.TID,), (NUMBER, HitField.PID)])
def test_pairs_add_up(pairing: Pairing, spans: Spans, key: tuple[Capture | HitField, ...]) -> None:
    """As many threads as possible have open spans with the same number, unless it is the key."""
    count, threads = 5000, 8 if key == (HitField.TID,) else 1
    span = Span(key, KEPT)
    total = threads * count
    counted = pairing.pair(span, Aggregate(Aggregation((COUNT,))))
    took = pairing.pair(span, Aggregate(Aggregation((COUNT, SUM, MIN, HISTOGRAM), (), ELAPSED, POWERS_OF_TWO)))
    by_start = pairing.pair(span, Aggregate(Aggregation((SUM, MIN), (THREAD, STARTED), NEGATIVE, max_keys=2 * total)))
    took_ns = spans.do("pair", count, threads)
    pairing.collect()
    assert pairing.entries == [0, 0, 0]
    pairing.close()
    for sink in (counted, took, by_start):
        assert sink.counts == SpanCounts(starts=total, paired=total)
        assert sink.fired_count == sink.told == 2 * total
        assert (sink.losses, sink.filtered_count) == ({}, 0)
    assert counted.rows == {(): Row(total)}
    (row,) = took.rows.values()
    assert row.count == row.values == sum(row.buckets.values()) == total
    assert row.low is not None
    assert 0 < total * row.low <= row.total < took_ns
    assert by_start.rows == {
        (thread, number): Row(1, 1, -number, -number, -number) for thread in range(threads) for number in range(count)
    }


def test_first_start_wins_and_others_are_nested(pairing: Pairing, spans: Spans) -> None:
    sink = pairing.pair(Span(start_captures=KEPT), Emit((NUMBER, NEGATIVE)))
    spans.do("nest", 100, 4)
    spans.do("end", 30, 2)
    pairing.collect()
    assert pairing.entries == [0]
    pairing.close()
    assert sorted(sink.values) == sorted((number, -number) for number in range(100) for _ in range(4))
    assert sink.counts == SpanCounts(starts=1200, paired=400, nested=800, unmatched=60)
    assert sink.fired_count == sink.told == 1660


def test_threads_that_end_in_spans(pairing: Pairing, spans: Spans) -> None:
    threads = 1500
    sink = pairing.pair(Span(), Emit((ELAPSED,)))
    of_numbers = pairing.pair(Span((THREAD,), max_open=2000), Emit((ELAPSED,)))
    spans.do("begin", 2, threads)
    pairing.collect()
    assert pairing.entries == [0, threads]
    assert sink.counts == SpanCounts(starts=2 * threads, nested=threads, died=threads)
    assert of_numbers.counts == SpanCounts(starts=2 * threads, nested=threads)
    # what other threads began may still be ended
    spans.do("end", 1, threads)
    pairing.collect()
    assert pairing.entries == [0, 0]
    assert len(of_numbers.values) == of_numbers.counts.paired == threads
    assert sink.counts.unmatched == threads
    pairing.close()
    assert sink.fired_count == sink.told


def test_program_that_executes_another_ends_its_spans(pairing: Pairing, spans: Spans) -> None:
    """Also if a thread does so that takes over the main thread's id, and if the main thread has a span of its own."""
    sink = pairing.pair(Span(), Emit((ELAPSED,)))
    spans.do("stay", 1)
    spans.execute(1, 1)
    pairing.collect()
    assert pairing.entries == [0]
    assert sink.counts == SpanCounts(starts=2, died=2)
    spans.do("stay", 1)
    pairing.collect()
    assert pairing.entries == [1]
    spans.do("end", 1)
    assert sink.values == []
    pairing.close()
    assert sink.counts == SpanCounts(starts=3, died=2, unmatched=1)
    assert sink.counts.open == 1


def test_full_table_says_so(pairing: Pairing, spans: Spans) -> None:
    full = pairing.pair(Span((NUMBER,), max_open=100), Emit((NUMBER,)))
    roomy = pairing.pair(Span((NUMBER,), max_open=10_000), Emit((NUMBER,)))
    spans.do("begin", 1000)
    spans.do("end", 1000)
    pairing.close()
    assert full.counts.starts == 1000
    assert full.counts.table_full > 0
    assert full.counts.paired == len(full.values) == 1000 - full.counts.table_full == 1000 - full.counts.unmatched
    assert roomy.counts == SpanCounts(starts=1000, paired=1000)


@pytest.mark.parametrize("order", ["end", "begin"])
def test_start_waits_no_longer_than_it_may(pairing: Pairing, spans: Spans, order: str) -> None:
    """Whoever comes next sees that it is late; who comes first, or nobody, the daemon looks."""
    sink = pairing.pair(Span((NUMBER,), timeout_ns=1), Emit((ELAPSED,)))
    patient = pairing.pair(Span((NUMBER,), timeout_ns=3_600_000_000_000), Emit((ELAPSED,)))
    spans.do("begin", 10)
    spans.do(order, 10)
    wait_for(lambda: pairing.entries[0] == 0, "starts to be taken out")
    pairing.collect()
    assert pairing.entries[1] == (0 if order == "end" else 10)
    pairing.close()
    starts = 10 if order == "end" else 20
    assert sink.counts == SpanCounts(starts=starts, timed_out=starts, unmatched=20 - starts)
    assert sink.values == []
    expected = SpanCounts(starts=10, paired=10) if order == "end" else SpanCounts(starts=20, nested=10)
    assert patient.counts == expected


def test_site_begins_ends_and_is_emitted_for_different_subscriptions(pairing: Pairing, spans: Spans) -> None:
    there = pairing.pair(Span(start_captures=(NUMBER,)), Emit((NUMBER, STARTED)), where="arg0 >= 10")
    back = pairing.pair(Span(start_captures=(NUMBER,)), Emit((NUMBER, STARTED)), swapped=True)
    plain = pairing.emit(begin=NUMBER, end=NUMBER)
    spans.do("pair", 100)
    pairing.close()
    assert there.values == [(number, number) for number in range(10, 100)]
    assert (there.filtered_count, there.counts) == (20, SpanCounts(starts=90, paired=90))
    assert back.values == [(number, number - 1) for number in range(1, 100)]
    # the last one's thread ends
    assert back.counts in (SpanCounts(starts=100, paired=99, unmatched=1, died=1), SpanCounts(100, 99, unmatched=1))
    assert plain.values == [(number,) for number in range(100) for _ in range(2)]
    for sink in (there, back, plain):
        assert sink.fired_count == sink.told == 200
