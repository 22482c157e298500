"""Hits that add up in the kernel: the rows equal what the threads of a program did, while banks are flipped."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from stapsdtd.aggregate.aggregation import Aggregation, Function, HitField, Key, Row
from stapsdtd.aggregate.buckets import FINE, POWERS_OF_TWO, Buckets, linear
from stapsdtd.aggregate.grouping import group
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import LossStage, ManyRows, Target, TargetSite
from stapsdtd.capture.names import Owner
from stapsdtd.elf import parse_object
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import CUT
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import BuiltIn, Capture, Object, ObjectKey
from stapsdtd.query.actions import Action, Aggregate, Emit
from stapsdtd.query.parse import parse
from stapsdtd.spans.span import SpanCounts
from tests.bench.setup import Firing
from tests.support import compile_target, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

COUNT, SUM, MIN, MAX, AVG, HISTOGRAM = (
    Function.COUNT, Function.SUM, Function.MIN, Function.MAX, Function.AVG, Function.HISTOGRAM,
)  # fmt: skip
NUMBER, NEGATIVE, THREAD = Capture(0), Capture(1), Capture(2)
LABEL = Capture(0, is_string=True, max_bytes=64)
SITE_ID = 7
PATIENCE_SECONDS = 60
HITS, THREADS = 100_000, 8
FLIP_SECONDS = 0.02


class AddingSink:
    """rows: of all hits so far, by site_id and key. grouped: of the events, the same."""

    def __init__(self, aggregation: Aggregation | None = None) -> None:
        self._aggregation = aggregation
        self.rows: dict[tuple[int, Key], Row] = {}
        self.fired_count = self.filtered_count = self.delivered_count = 0
        self.losses: Counter[LossStage] = Counter()

    def deliver(self, batch: EventBatch) -> None:
        self.delivered_count += len(batch)
        if self._aggregation is not None:
            self.aggregated(0, group(self._aggregation, batch, lambda _, field: field.value.encode()))

    def aggregated(self, site_id: int, rows: Mapping[Key, Row]) -> None:
        for key, row in rows.items():
            known = self.rows.setdefault((site_id, key), row)
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

    def spanned(self, counts: SpanCounts) -> None:
        del counts

    def lost(self, stage: LossStage, count: int) -> None:
        self.losses[stage] += count

    @property
    def counted(self) -> int:
        return sum(row.count for row in self.rows.values())


class Adding:
    """A bpf engine, whose subscriptions are numbered as they are opened."""

    def __init__(self, engine: BpfEngine) -> None:
        self._engine = engine
        self._opened = 0

    def arm(self, path: Path, action: Action, sink: AddingSink, where: str = "") -> int:
        self._opened += 1
        self._engine.open(self._opened, sink, 4096, f"client {self._opened}", sink)
        assert self._engine.arm(self._opened, target(path, action, where)) == []
        return self._opened

    def add(self, path: Path, aggregation: Aggregation, where: str = "") -> AddingSink:
        sink = AddingSink()
        self.arm(path, Aggregate(aggregation), sink, where)
        return sink

    def collect(self) -> None:
        for subscription_key in range(1, self._opened + 1):
            self._engine.collect(subscription_key).result(PATIENCE_SECONDS)

    def close(self, *subscription_keys: int) -> None:
        keys = subscription_keys or tuple(range(1, self._opened + 1))
        closed: list[Future[None]] = [self._engine.close(key) for key in keys]
        for each in closed:
            each.result(PATIENCE_SECONDS)

    def retry_cleanup(self) -> None:
        self._engine.retry_cleanup()

    @property
    def table_bytes(self) -> int:
        return self._engine.metrics().table_bytes


def target(path: Path, action: Action, where: str = "") -> Target:
    with open(path, "rb") as file:
        parsed = parse_object(file)
        status = os.fstat(file.fileno())
    key = ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    (site,) = parsed.sites
    predicate = parse(where, lambda _: None) if where else None
    return Target(Object(key, str(path), parsed), str(path), (TargetSite(site, SITE_ID, action, predicate=predicate),))


@pytest.fixture
def adding() -> Iterator[Adding]:
    paging = Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    engine = BpfEngine(Tracefs.locate(), Owner.this_process(), Loaded(), paging)
    try:
        yield Adding(engine)
    finally:
        engine.shutdown()


@pytest.fixture
def firing(tmp_path: Path) -> Iterator[Firing]:
    with Firing(tmp_path) as firing:
        yield firing


def while_flipping(adding: Adding, work: Callable[[], object]) -> None:
    """Flip the banks as long as some work takes."""
    with ThreadPoolExecutor(1) as worker:
        working = worker.submit(work)
        while not wait([working], FLIP_SECONDS).done:
            adding.collect()
        working.result()


def counts_of(buckets: Buckets, values: range) -> dict[int, int]:
    numbers, counts = np.unique(buckets.numbers(np.array(values, np.int64)), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def test_rows_equal_what_threads_fired_while_banks_are_flipped(adding: Adding, firing: Firing) -> None:
    by_thread = (THREAD, HitField.PID, HitField.EXECNAME)
    counted = adding.add(firing.path, Aggregation((COUNT,)))
    by_site = adding.add(firing.path, Aggregation((COUNT,), (HitField.NAME,)))
    summed = adding.add(firing.path, Aggregation((COUNT, SUM, MIN, MAX, AVG), by_thread, NEGATIVE))
    filtered = adding.add(firing.path, Aggregation((COUNT, MAX), (THREAD,), NUMBER), f"arg0 < {HITS // 4}")
    powers = adding.add(firing.path, Aggregation((HISTOGRAM,), (THREAD,), NEGATIVE, POWERS_OF_TWO))
    fine = adding.add(firing.path, Aggregation((HISTOGRAM, AVG), (), NUMBER, FINE))
    edges = linear(0, HITS, 777)
    stepped = adding.add(firing.path, Aggregation((HISTOGRAM,), (HitField.MODULE,), NUMBER, edges))
    emitted = AddingSink()
    adding.arm(firing.path, Emit((NUMBER,)), emitted)
    while_flipping(adding, lambda: firing.fire(HITS, threads=THREADS))
    adding.collect()
    assert [sink.counted for sink in (counted, summed, fine)] == [THREADS * HITS] * 3
    adding.close()
    assert counted.rows == {(0, ()): Row(THREADS * HITS)}
    assert by_site.rows == {(SITE_ID, (None,)): Row(THREADS * HITS)}
    total = HITS * (HITS - 1) // 2
    assert summed.rows == {
        (0, (thread, firing.pid, b"firing")): Row(HITS, HITS, -total, -(HITS - 1), 0) for thread in range(THREADS)
    }
    passed = HITS // 4
    assert filtered.rows == {(0, (thread,)): Row(passed, passed, 0, 0, passed - 1) for thread in range(THREADS)}
    expected = counts_of(POWERS_OF_TWO, range(-HITS + 1, 1))
    assert powers.rows == {(0, (thread,)): Row(HITS, HITS, buckets=expected) for thread in range(THREADS)}
    fine_counts = {bucket: THREADS * count for bucket, count in counts_of(FINE, range(HITS)).items()}
    assert fine.rows == {(0, ()): Row(THREADS * HITS, THREADS * HITS, THREADS * total, buckets=fine_counts)}
    step_counts = {bucket: THREADS * count for bucket, count in counts_of(edges, range(HITS)).items()}
    assert stepped.rows == {(SITE_ID, (None,)): Row(THREADS * HITS, THREADS * HITS, buckets=step_counts)}
    for sink in (counted, by_site, summed, filtered, powers, fine, stepped):
        assert sink.fired_count == THREADS * HITS
        assert sink.losses == {}
        assert sink.filtered_count == THREADS * HITS - sink.counted
    # who wants events beside them gets all
    assert (emitted.fired_count, emitted.delivered_count + emitted.losses.total()) == (THREADS * HITS,) * 2


def test_full_table_loses_its_own_hits_and_says_so(adding: Adding, firing: Firing) -> None:
    crowded = adding.add(firing.path, Aggregation((COUNT,), (NUMBER,), max_keys=100))
    roomy = adding.add(firing.path, Aggregation((COUNT,), (NUMBER,), max_keys=2 * HITS // 10))
    firing.fire(HITS // 10, threads=4)
    adding.close()
    assert crowded.losses[LossStage.TABLE_FULL] > 0
    assert crowded.fired_count == crowded.counted + crowded.losses.total() == 4 * HITS // 10
    assert len(crowded.rows) >= 100
    assert roomy.rows == {(0, (number,)): Row(4) for number in range(HITS // 10)}
    assert roomy.losses == {}


def test_tables_come_and_go_amid_hits(adding: Adding, firing: Firing) -> None:
    always = adding.add(firing.path, Aggregation((COUNT,), (THREAD,)))
    before = adding.table_bytes
    passing: list[AddingSink] = []

    def come_and_go() -> None:
        for _ in range(20):
            sink = AddingSink()
            key = adding.arm(firing.path, Aggregate(Aggregation((COUNT, SUM), (THREAD,), NUMBER)), sink)
            adding.close(key)
            passing.append(sink)

    firing.begin(seconds=600, threads=2)
    come_and_go()
    for sink in passing:
        assert sink.fired_count == sink.counted
        assert sink.losses == {}
    assert sum(sink.counted for sink in passing) > 0
    adding.retry_cleanup()
    wait_for(lambda: adding.table_bytes == before, "the tables to be gone")
    adding.close(1)
    assert always.fired_count == always.counted
    adding.retry_cleanup()
    wait_for(lambda: adding.table_bytes == 0, "the last table to be gone")


class Labels:
    """A running tests/targets/labels.c."""

    def __init__(self, folder: Path) -> None:
        self.path = compile_target("labels.c", folder / "labels", "-lpthread")
        self._process = subprocess.Popen([self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready\n"

    def fire(self, count: int, threads: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {threads}\n")
        self._process.stdin.flush()
        assert self._answer() == "done\n"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def labels(tmp_path: Path) -> Iterator[Labels]:
    with Labels(tmp_path) as labels:
        yield labels


TEXTS: list[bytes | None] = [None, b"", b"c", b"d" * 7, b"e" * 62, b"f" * 63, b"g" * 64, b"h" * 64 + CUT]
"""The program's labels, cut to 64 bytes."""


def test_strings_are_keys(adding: Adding, labels: Labels) -> None:
    sink = adding.add(labels.path, Aggregation((COUNT, SUM), (LABEL, HitField.PROVIDER), Capture(2)))
    count = 10_000
    while_flipping(adding, lambda: labels.fire(count, 4))
    adding.close()
    turns = count // len(TEXTS)
    assert sink.rows == {
        (SITE_ID, (text, None)): Row(4 * turns, 4 * turns, 4 * sum(range(number, count, len(TEXTS))))
        for number, text in enumerate(TEXTS)
    }
    assert sink.losses == {}


@pytest.mark.parametrize("size", [1, 12, 64, 128])
def test_bytes_are_keys(adding: Adding, labels: Labels, size: int) -> None:
    """Of 128 bytes each, which are zeros behind the label."""
    sink = adding.add(labels.path, Aggregation((COUNT,), (Capture(0, is_buffer=True, max_bytes=size), LABEL)))
    count = 10_000
    while_flipping(adding, lambda: labels.fire(count, 4))
    adding.close()
    whole = [*TEXTS[:-1], b"h" * 100]
    buffers = [None if text is None else text.ljust(size, b"\0")[:size] for text in whole]
    assert sink.rows == {(0, key): Row(4 * count // len(TEXTS)) for key in zip(buffers, TEXTS, strict=True)}
    assert sink.losses == {}


@pytest.mark.parametrize(
    "aggregation",
    [
        Aggregation((COUNT,), (LABEL, HitField.CPU, HitField.TID)),
        Aggregation((COUNT, MIN, MAX), (Capture(BuiltIn.UID), Capture(BuiltIn.GID)), Capture(1)),
        Aggregation((SUM, HISTOGRAM), (Capture(BuiltIn.CGROUP), Capture(BuiltIn.CONTAINER)), Capture(2), FINE),
        Aggregation((COUNT, SUM), (Capture(1),), Capture(0, is_string=True)),
        Aggregation((COUNT, SUM), (Capture(0, is_buffer=True, max_bytes=20), Capture(1)), Capture(2)),
    ],
)
def test_rows_equal_those_of_the_events(adding: Adding, labels: Labels, aggregation: Aggregation) -> None:
    """Two subscriptions get the same hits, once as rows and once as events, which the daemon groups."""
    summed = adding.add(labels.path, aggregation)
    grouped = AddingSink(aggregation)
    adding.arm(labels.path, Emit(aggregation.captures), grouped)
    labels.fire(1000, 4)
    adding.close()
    assert {key: told(aggregation, row) for key, row in summed.rows.items()} == {
        key: told(aggregation, row) for key, row in grouped.rows.items()
    }
    assert summed.counted == grouped.counted == 4000


def told(aggregation: Aggregation, row: Row) -> list[object]:
    """What a row says of what was asked for."""
    of_function: dict[Function, object] = {
        COUNT: row.count, SUM: row.total, MIN: row.low, MAX: row.high, AVG: row.average, HISTOGRAM: row.buckets,
    }  # fmt: skip
    return [row.values, *(of_function[function] for function in aggregation.functions)]
