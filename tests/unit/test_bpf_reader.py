"""The reader's thread, over rings in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from stapsdtd.capture.bpf import layout, rings
from stapsdtd.capture.bpf import reader as reader_module
from stapsdtd.capture.bpf.decode import RecordDecoder
from stapsdtd.capture.bpf.encode import Filter, encode_value
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, NumberAt, Reading
from stapsdtd.capture.bpf.rings import Records
from stapsdtd.capture.bpf.tables import PlanSpec, Tables
from stapsdtd.capture.engine import LossStage
from stapsdtd.events.batch import EventBatch
from stapsdtd.model import Memory, Operand
from stapsdtd.plan.values import Value
from stapsdtd.runtime.mailbox import ThreadEndedError
from tests.support import descriptors, wait_for
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeLoaded, MemoryRing, RecordingSink, memory, record
from tests.unit.samples import RDI, argument, channels_of

pytestmark = pytest.mark.timeout(60)

SMALL, LARGE = layout.STRIDES[0], layout.STRIDES[1]
EVERYTHING = Filter(None, frozenset(), None)


class Host:
    """A reader with its tables, and the kernel's side of both."""

    def __init__(self) -> None:
        self.loaded = FakeLoaded()
        self.tables = Tables(self.loaded.table, self.loaded.cpus)
        self.brought_in: list[tuple[int, int, int]] = []
        self.reader = Reader(self.tables, self.loaded.set_reader_waits, self.bring_in)
        self.sink = RecordingSink()

    def bring_in(self, *place: int) -> None:
        pid, address, byte_count = place
        self.brought_in.append((pid, address, byte_count))

    def add_ring(self, stride: int = SMALL, size: int = 4096) -> MemoryRing:
        made = self.loaded.make_ring(stride, size)
        self.reader.add_ring(made)
        return made

    def begin(
        self, *sinks: RecordingSink, filters: Sequence[Filter] = (EVERYTHING,), operand: Operand = RDI
    ) -> ActivePlan:
        """A plan of one number. The sinks' site_ids are 1, 2, …; each has a filter of its own as far as they last."""
        value = encode_value(Value(0), argument(operand), "x86-64")
        entry = self.tables.allocate_plan(PlanSpec([value], [], dict(enumerate(filters)), {0: 0}, has_texts=False))
        readings = tuple(
            Reading(Channel(number, sink), min(number, len(filters)) - 1, number, (NumberAt(0, is_signed=False),))
            for number, sink in enumerate(sinks or (self.sink,), 1)
        )
        tested = sum(1 << bit for bit, wanted in enumerate(filters) if not wanted.accepts_all)
        plan = ActivePlan(entry, channels_of(readings), readings, tested)
        self.reader.begin([plan])
        return plan

    def end(self, *plans: ActivePlan, closing: Sequence[Channel] = ()) -> None:
        self.reader.end(plans, closing).result(PATIENCE_SECONDS)

    def in_reader(self, *jobs: Callable[[], None]) -> None:
        """Do something while it looks at nothing."""

        def job() -> None:
            for each in jobs:
                each()

        self.reader._jobs.call(job)

    def put(self, ring: MemoryRing, plan: ActivePlan, value: int, *, time_ns: int | None = None, **more: int) -> None:
        """A hit: counted, written, and told to a reader that waits."""
        self.count(plan, Counter.HITS, 1)
        at = time.monotonic_ns() if time_ns is None else time_ns
        assert ring.put(record(ring.stride, plan.entry.generation, value, time_ns=at, **more))
        self.loaded.wake_up(ring)

    def count(self, plan: ActivePlan, counter: Counter, count: int, bit: int = 0, cpu: int = 0) -> None:
        self.loaded.counters()[cpu, plan.entry.cell(counter, bit)] += count


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(rings, "create_ring", memory)
    made = Host()
    yield made
    if made.reader._thread.is_alive():
        made.reader.stop()
    for ring in made.loaded.made:
        if not ring.is_closed:
            ring.close()


def numbers(sink: RecordingSink) -> list[int | None]:
    return [row[-1] for row in sink.rows]


def test_records_reach_the_sink_once_and_in_order(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    for number in range(200):
        wait_for(lambda: ring.filled + ring.stride <= ring.size, "room")
        host.put(ring, plan, number, time_ns=1000 + number, pid=20 + number, cpu=1)
    wait_for(lambda: len(host.sink.rows) >= 200, "the events")
    host.end(plan)
    assert host.sink.rows == [(1000 + number, 20 + number, 11, 1, b"app", 1, number) for number in range(200)]
    assert (host.sink.losses, host.sink.filtered_count, ring.filled) == ({}, 0, 0)


def test_reader_that_waits_is_woken_by_a_record(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_IDLE_MS", 50_000)
    ring, plan = host.add_ring(), host.begin()
    for number in range(3):
        wait_for(lambda: host.loaded.reader_waits, "the reader to wait")
        host.put(ring, plan, number)
        wait_for(lambda: len(host.sink.rows) == number + 1, "the event")  # noqa: B023 - called at once
    assert numbers(host.sink) == [0, 1, 2]


def test_record_that_came_before_the_flag_was_seen_is_not_waited_for(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_IDLE_MS", 50_000)
    ring, plan = host.add_ring(), host.begin()
    set_waiting = host.loaded.set_reader_waits
    late = [7]

    def put_just_before(waits: bool) -> None:
        if waits and late:
            assert ring.put(record(ring.stride, plan.entry.generation, late.pop()))
        set_waiting(waits)

    host.reader._poller._set_waiting = put_just_before
    host.in_reader(lambda: None)
    wait_for(lambda: numbers(host.sink) == [7], "the event")


def test_rings_are_merged_by_time(host: Host) -> None:
    small, large, plan = host.add_ring(), host.add_ring(LARGE), host.begin()
    start = time.monotonic_ns()

    def put() -> None:
        for number in range(20):
            host.put(small if number % 3 else large, plan, number, time_ns=start + number)

    host.in_reader(put)
    wait_for(lambda: len(host.sink.rows) == 20, "the events")
    assert numbers(host.sink) == list(range(20))


def test_no_ring_goes_beyond_what_was_read_of_one_that_has_more(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_ROWS_PER_SWEEP", 4)
    small, large, plan = host.add_ring(), host.add_ring(LARGE), host.begin()
    start = time.monotonic_ns()

    def put() -> None:
        for number in range(30):
            host.put(small if 2 < number < 25 else large, plan, number, time_ns=start + number)

    host.in_reader(put)
    wait_for(lambda: len(host.sink.rows) == 30, "the events")
    assert numbers(host.sink) == list(range(30))
    assert len(host.sink.calls) > 5


def test_of_several_rings_nothing_is_told_that_is_later_than_the_look_at_them(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large, plan = host.add_ring(), host.add_ring(LARGE), host.begin()
    start = time.monotonic_ns() + 100_000_000
    early: list[int] = []
    deliver = host.sink.deliver

    def watched(batch: EventBatch) -> None:
        if time.monotonic_ns() < start:
            early.append(len(batch))
        deliver(batch)

    monkeypatch.setattr(host.sink, "deliver", watched)
    host.in_reader(*(partial(host.put, ring, plan, 1, time_ns=start) for ring in (small, large)))
    wait_for(lambda: len(host.sink.rows) == 2, "the events")
    assert early == []


def test_record_that_is_being_written_holds_back_those_behind_it(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    completes: list[Callable[[], None]] = []

    def put() -> None:
        host.put(ring, plan, 1)
        host.count(plan, Counter.HITS, 1)
        completes.append(ring.put_busy(record(ring.stride, plan.entry.generation, 2)))
        host.put(ring, plan, 3)

    host.in_reader(put)
    wait_for(lambda: numbers(host.sink) == [1], "the first event")
    host.in_reader(lambda: None)
    host.in_reader(lambda: None)
    assert numbers(host.sink) == [1]
    completes[0]()
    wait_for(lambda: numbers(host.sink) == [1, 2, 3], "the others")


def test_discarded_record_is_no_event(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()

    def put() -> None:
        host.put(ring, plan, 1)
        ring.put_discarded(record(ring.stride, plan.entry.generation, 2))
        host.put(ring, plan, 3)

    host.in_reader(put)
    wait_for(lambda: numbers(host.sink) == [1, 3], "the events")
    assert ring.filled == 0


def test_record_of_an_unknown_plan_costs_no_other(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()

    def put() -> None:
        host.put(ring, plan, 1)
        assert ring.put(record(ring.stride, plan.entry.generation + 1, 2))
        host.put(ring, plan, 3)

    host.in_reader(put)
    wait_for(lambda: numbers(host.sink) == [1, 3], "the events")
    host.end(plan)
    assert host.sink.losses == {}


def test_record_reaches_each_subscription_that_it_matched(host: Host) -> None:
    first, second = RecordingSink(), RecordingSink()
    ring = host.add_ring()
    plan = host.begin(first, second, filters=[Filter(frozenset({pid}), frozenset(), None) for pid in (7, 8)])
    host.in_reader(*(partial(host.put, ring, plan, matched, matched=matched) for matched in (1, 2, 3)))
    wait_for(lambda: len(first.rows) + len(second.rows) == 4, "the events")
    assert (first.values, second.values) == ([(1, 1), (1, 3)], [(2, 2), (2, 3)])


def test_counters_are_told_exactly_over_all_cpus_while_it_runs(host: Host) -> None:
    plan = host.begin()
    host.in_reader(
        partial(host.count, plan, Counter.LOST, 3, cpu=0),
        partial(host.count, plan, Counter.LOST, 4, cpu=1),
        partial(host.count, plan, Counter.FILTERED, 50, cpu=1),
        partial(host.count, plan, Counter.EXCLUDED, 600),
        partial(host.count, plan, Counter.HITS, 657),
    )
    expected = {LossStage.KERNEL_BUFFER: 7}, 50
    wait_for(lambda: (host.sink.losses, host.sink.filtered_count) == expected, "the figures")
    host.count(plan, Counter.LOST, 1)
    host.count(plan, Counter.HITS, 1)
    wait_for(lambda: host.sink.losses == {LossStage.KERNEL_BUFFER: 8}, "the next loss")
    host.count(plan, Counter.FILTERED, 2)
    host.count(plan, Counter.HITS, 2)
    host.end(plan)
    assert (host.sink.losses, host.sink.filtered_count) == ({LossStage.KERNEL_BUFFER: 8}, 52)


def test_counters_are_told_to_those_whose_filter_they_are_of(host: Host) -> None:
    sinks = [RecordingSink() for _ in range(3)]
    filters = [Filter(frozenset({pid}), frozenset(), None) for pid in (7, 8)]
    plan = host.begin(*sinks, filters=filters)
    host.count(plan, Counter.LOST, 1, bit=0)
    host.count(plan, Counter.FILTERED, 2, bit=0)
    host.count(plan, Counter.LOST, 30, bit=1)
    host.count(plan, Counter.FILTERED, 40, bit=1)
    host.count(plan, Counter.EXCLUDED, 67, bit=0)
    host.count(plan, Counter.HITS, 70)
    host.end(plan)
    told = [(sink.losses, sink.filtered_count) for sink in sinks]
    of_second = ({LossStage.KERNEL_BUFFER: 30}, 40)
    assert told == [({LossStage.KERNEL_BUFFER: 1}, 2), of_second, of_second]


def test_counters_of_a_plan_that_ended_are_told_no_more(host: Host) -> None:
    first, second = host.begin(), host.begin()
    host.end(first)
    host.count(first, Counter.LOST, 5)
    host.count(second, Counter.LOST, 1)
    host.count(second, Counter.HITS, 1)
    wait_for(lambda: host.sink.losses, "the loss")
    assert host.sink.losses == {LossStage.KERNEL_BUFFER: 1}


def test_end_delivers_what_is_left(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    for number in range(30):
        assert ring.put(record(ring.stride, plan.entry.generation, number))
    host.count(plan, Counter.HITS, 30)
    host.end(plan)
    assert numbers(host.sink) == list(range(30))
    assert host.sink.losses == {}


def test_end_is_not_over_before_what_was_written_until_then_is_read(host: Host) -> None:
    """A record of another site's that is still being written delays it, and nothing else."""
    small, large = host.add_ring(), host.add_ring(LARGE)
    ended, other, later = host.begin(), host.begin(), host.begin()
    completes: list[Callable[[], None]] = []

    def put() -> None:
        completes.append(small.put_busy(record(small.stride, other.entry.generation, 1, time_ns=time.monotonic_ns())))
        host.count(other, Counter.HITS, 1)
        host.put(small, ended, 2)
        host.count(ended, Counter.FILTERED, 1)
        host.count(ended, Counter.HITS, 1)

    host.in_reader(put)
    over = host.reader.end([ended], [])
    host.reader.end([later], []).add_done_callback(lambda _: completes.append(lambda: None))
    host.in_reader(lambda: None)
    # others' records are delivered, and what they fired is told
    host.put(large, other, 3)
    wait_for(lambda: numbers(host.sink) == [3] and host.sink.fired_count == 4, "what is not behind it")
    host.in_reader(lambda: None)
    assert (over.done(), len(completes)) == (False, 1)
    completes[0]()
    over.result(PATIENCE_SECONDS)
    assert set(numbers(host.sink)) == {1, 2, 3}
    assert host.sink.told == (4, 3, 1, {})
    wait_for(lambda: len(completes) == 2, "the next ending")


def test_end_does_not_wait_for_what_is_written_later(host: Host) -> None:
    ring, ended, other = host.add_ring(), host.begin(), host.begin()
    over: list[Future[None]] = []

    def put() -> None:
        host.put(ring, ended, 1)

    host.in_reader(put)
    over.append(host.reader.end([ended], []))
    late = partial(ring.put_busy, record(ring.stride, other.entry.generation, 2, time_ns=time.monotonic_ns()))
    completes: list[Callable[[], None]] = []
    host.in_reader(lambda: completes.append(late()))
    over[0].result(PATIENCE_SECONDS)
    assert numbers(host.sink) == [1]
    completes[0]()
    wait_for(lambda: numbers(host.sink) == [1, 2], "the other's")


def test_plan_that_ended_is_forgotten_and_its_generation_is_nobodys(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    ring, plan = host.add_ring(), host.begin()
    host.end(plan)
    assert ring.put(record(ring.stride, plan.entry.generation, 1))
    host.loaded.wake_up(ring)
    wait_for(lambda: host.reader.unknown == 1, "the stray")
    assert (host.sink.told, host.reader._plans, host.reader._counters._by_cell) == ((0, 0, 0, {}), {}, {})
    wait_for(lambda: "1 records name plans that are not known" in caplog.text, "the log")


def test_thread_that_ends_leaves_nobody_waiting_for_an_ending(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    ring.put_busy(record(ring.stride, plan.entry.generation, 1))
    over = host.reader.end([plan], [])
    host.in_reader(lambda: None)
    host.reader.stop()
    with pytest.raises(ThreadEndedError):
        over.result(PATIENCE_SECONDS)
    with pytest.raises(ThreadEndedError):
        host.reader.end([plan], []).result(PATIENCE_SECONDS)


def test_what_fired_is_told_apart_from_what_became_of_it(host: Host) -> None:
    first, second = RecordingSink(), RecordingSink()
    filters = [Filter(frozenset({pid}), frozenset(), None) for pid in (7, 8)]
    ring, plan = host.add_ring(), host.begin(first, second, filters=filters)
    # a hit under way is excluded or filtered already, and counted as a hit only behind that
    host.count(plan, Counter.EXCLUDED, 3, bit=0)
    host.count(plan, Counter.FILTERED, 2, bit=1)
    wait_for(lambda: second.filtered_count == 2, "the figures")
    assert (first.told, second.told) == ((0, 0, 0, {}), (0, 0, 2, {}))
    host.count(plan, Counter.HITS, 2)
    wait_for(lambda: second.fired_count == 2, "what fired")
    assert first.fired_count == 0
    host.count(plan, Counter.HITS, 1, cpu=1)
    host.put(ring, plan, 5, matched=3)
    host.end(plan)
    assert (first.told, second.told) == ((1, 1, 0, {}), (4, 1, 2, {LossStage.DECODE: 1}))


def test_room_of_a_plan_that_ended_counts_anew_for_the_next(host: Host) -> None:
    first = host.begin()
    host.count(first, Counter.HITS, 5)
    host.count(first, Counter.LOST, 5)
    host.end(first)
    assert host.sink.told == (5, 0, 0, {LossStage.KERNEL_BUFFER: 5})
    host.tables.free_plan(first.entry)
    sink = RecordingSink()
    second = host.begin(sink)
    assert (second.entry.counters, second.entry.id) == (first.entry.counters, first.entry.id)
    assert second.entry.generation != first.entry.generation
    host.count(second, Counter.HITS, 5)
    host.count(second, Counter.LOST, 5)
    host.end(second)
    assert (host.sink.told, sink.told) == ((5, 0, 0, {LossStage.KERNEL_BUFFER: 5}),) * 2


def test_what_could_not_be_read_is_asked_for_and_counted(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin(operand=Memory("rsp", 8))
    there = layout.UNREAD_OPERAND | 0x7000
    host.in_reader(
        partial(host.put, ring, plan, there, missing=1, pid=7),
        partial(host.put, ring, plan, 5),
        partial(host.put, ring, plan, there + 0x1000, missing=1, pid=8),
    )
    wait_for(lambda: len(host.sink.rows) == 3, "the events")
    assert numbers(host.sink) == [None, 5, None]
    assert host.brought_in == [(7, 0x7000, 8), (8, 0x8000, 8)]
    assert (host.reader.from_file, host.reader.unavailable) == (0, 2)


def test_what_cannot_be_asked_for_costs_no_event(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_place: int) -> None:
        raise RuntimeError("can't start new thread")

    host.reader._bring_in = fails
    ring, plan = host.add_ring(), host.begin(operand=Memory("rsp", 8))
    host.put(ring, plan, layout.UNREAD_OPERAND, missing=1)
    host.end(plan)
    assert (numbers(host.sink), host.sink.told) == ([None], (1, 1, 0, {}))
    assert "can't start new thread" in caplog.text


def test_sink_that_raises_does_not_hold_up_an_ending(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_count: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(host.sink, "fired", fails)
    plan, other = host.begin(), host.begin(sink := RecordingSink())
    host.count(plan, Counter.HITS, 1)
    host.count(other, Counter.HITS, 1)
    host.count(other, Counter.LOST, 1)
    host.end(plan)
    host.end(other)
    assert sink.told == (1, 0, 0, {LossStage.KERNEL_BUFFER: 1})
    assert (host.reader._plans, host.reader._counters._by_cell) == ({}, {})


def test_what_was_counted_and_never_came_is_lost(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    for counter, count in ((Counter.HITS, 10), (Counter.FILTERED, 3), (Counter.EXCLUDED, 1), (Counter.LOST, 2)):
        host.count(plan, counter, count)
    assert ring.put(record(ring.stride, plan.entry.generation, 5))
    host.end(plan)
    assert host.sink.losses == {LossStage.KERNEL_BUFFER: 2, LossStage.DECODE: 3}
    assert (host.sink.filtered_count, numbers(host.sink)) == (3, [5])


def test_last_figures_that_cannot_be_had_do_not_hold_up_an_ending(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, channel = host.begin(), Channel(1, host.sink)

    def fails() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(host.tables, "totals", fails)
        host.end(plan, closing=[channel])
    assert not channel.is_open
    assert (host.reader._plans, host.reader._counters._by_cell) == ({}, {})


def test_end_of_one_plan_leaves_the_others(host: Host) -> None:
    ring, first, second = host.add_ring(), host.begin(), host.begin()
    host.end(first)
    host.put(ring, second, 2)
    wait_for(lambda: numbers(host.sink) == [2], "the event")


def test_jobs_are_done_while_no_events_come(host: Host) -> None:
    wait_for(lambda: host.loaded.reader_waits, "the reader to wait")
    done: list[threading.Thread] = []
    for _ in range(3):
        host.in_reader(lambda: done.append(threading.current_thread()))
    assert done == [host.reader._thread] * 3


def test_jobs_are_done_while_events_come_without_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, plan = host.add_ring(), host.begin()
    deliver = host.sink.deliver

    def one_more(batch: EventBatch) -> None:
        deliver(batch)
        host.put(ring, plan, 1)

    monkeypatch.setattr(host.sink, "deliver", one_more)
    host.put(ring, plan, 1)
    wait_for(lambda: len(host.sink.rows) > 5, "events")
    host.in_reader(lambda: None)
    monkeypatch.setattr(host.sink, "deliver", deliver)


def test_what_a_job_raises_reaches_the_caller_and_the_thread_goes_on(host: Host) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        host.in_reader(fails)
    ring, plan = host.add_ring(), host.begin()
    host.put(ring, plan, 1)
    wait_for(lambda: numbers(host.sink) == [1], "the event")


def test_sink_that_raises_loses_its_own_events_and_no_others(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = RecordingSink(), RecordingSink()
    ring, plan = host.add_ring(), host.begin(bad, good)
    deliver = bad.deliver

    def fails(_batch: EventBatch) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bad, "deliver", fails)
    host.in_reader(*(partial(host.put, ring, plan, number) for number in range(4)))
    wait_for(lambda: len(good.rows) == 4 and bad.losses == {LossStage.DECODE: 4}, "the events and the loss")
    monkeypatch.setattr(bad, "deliver", deliver)
    host.put(ring, plan, 5)
    host.end(plan)
    assert (numbers(bad), numbers(good)) == ([5], [0, 1, 2, 3, 5])
    assert (bad.losses, good.losses) == ({LossStage.DECODE: 4}, {})


def test_records_that_cannot_be_decoded_are_lost_when_their_plan_ends(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, plan = host.add_ring(), host.begin()
    failures = [ZeroDivisionError()]

    by_plan = RecordDecoder._by_plan

    def fails(decoder: RecordDecoder) -> object:
        if failures:
            raise failures.pop()
        return by_plan(decoder)

    monkeypatch.setattr(RecordDecoder, "_by_plan", fails)
    host.in_reader(*(partial(host.put, ring, plan, number) for number in range(3)))
    wait_for(lambda: not failures and not ring.filled, "the failure")
    host.put(ring, plan, 3)
    wait_for(lambda: numbers(host.sink) == [3], "the next event")
    host.end(plan)
    assert host.sink.losses == {LossStage.DECODE: 3}


def test_failing_sweep_does_not_end_the_thread(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring, plan = host.add_ring(), host.begin()
    peek = ring.peek
    failures = [ZeroDivisionError()]

    def fails(most: int) -> rings.Records:
        if failures:
            raise failures.pop()
        return peek(most)

    monkeypatch.setattr(ring, "peek", fails)
    host.put(ring, plan, 1)
    wait_for(lambda: numbers(host.sink) == [1], "the event")
    assert "reading events failed" in caplog.text


def test_hits_of_processes_that_were_left_out_later_count_as_filtered(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    plan.readings[0].channel.excluded = frozenset({8})
    host.in_reader(*(partial(host.put, ring, plan, pid, pid=pid) for pid in (7, 8, 9)))
    wait_for(lambda: numbers(host.sink) == [7, 9], "the events")
    assert host.sink.filtered_count == 1


def test_ring_that_was_retired_is_closed_when_it_is_empty(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    complete = ring.put_busy(record(ring.stride, plan.entry.generation, 1, time_ns=time.monotonic_ns()))
    host.count(plan, Counter.HITS, 1)
    host.reader.retire_ring(ring)
    host.in_reader()
    assert not ring.is_closed
    complete()
    wait_for(lambda: ring.is_closed, "the ring to be closed")
    other = host.add_ring()
    host.put(other, plan, 2)
    wait_for(lambda: numbers(host.sink) == [1, 2], "the events")


def test_record_that_stays_busy_does_not_make_the_reader_spin(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, plan = host.add_ring(), host.begin()
    complete = ring.put_busy(record(ring.stride, plan.entry.generation, 1, time_ns=time.monotonic_ns()))
    host.count(plan, Counter.HITS, 1)
    sweeps = 0
    sweep = host.reader._sweep

    def counted() -> int:
        nonlocal sweeps
        sweeps += 1
        return sweep()

    begin = time.monotonic()
    monkeypatch.setattr(host.reader, "_sweep", counted)
    host.in_reader()
    wait_for(lambda: sweeps >= 20, "some sweeps")
    # a millisecond each, whatever else the host does
    assert time.monotonic() - begin > 0.01
    complete()
    wait_for(lambda: numbers(host.sink) == [1], "the event")


def test_of_one_ring_nothing_is_told_that_is_later_than_the_look_at_all(host: Host) -> None:
    small, large = host.add_ring(), host.add_ring(LARGE)
    plan = host.begin()
    peek, pending = large.peek, [1]

    def peek_late(most: int) -> Records:
        # a hit goes to the ring that was looked at already, and then one to this
        if pending:
            pending.pop()
            host.put(small, plan, 1)
            host.put(large, plan, 2)
        return peek(most)

    large.peek = peek_late  # type: ignore[method-assign]
    host.in_reader()
    wait_for(lambda: len(host.sink.rows) == 2, "the events")
    assert numbers(host.sink) == [1, 2]


def test_records_that_cannot_be_made_columns_are_lost_when_their_plan_ends(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, plan = host.add_ring(), host.begin()
    head, failures = RecordDecoder._head, [ZeroDivisionError()]

    def failing(decoder: RecordDecoder, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return head(decoder, *arguments)

    monkeypatch.setattr(RecordDecoder, "_head", failing)
    host.in_reader(*(partial(host.put, ring, plan, number) for number in range(3)))
    wait_for(lambda: not failures and not ring.filled, "the records to be read")
    host.end(plan)
    assert (len(host.sink.rows), host.sink.losses) == (0, {LossStage.DECODE: 3})


def test_sink_that_raises_loses_what_was_for_it_and_not_what_was_left_out(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, plan = host.add_ring(), host.begin()
    plan.readings[0].channel.excluded = frozenset({8})

    def failing(_batch: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(host.sink, "deliver", failing)
    host.in_reader(*(partial(host.put, ring, plan, pid, pid=pid) for pid in (7, 8)))
    host.end(plan)
    assert (host.sink.filtered_count, host.sink.losses) == (1, {LossStage.DECODE: 1})


def test_channel_that_was_closed_is_told_nothing(host: Host) -> None:
    """A plan that could not be replaced may still bring events of it."""
    ring, plan = host.add_ring(), host.begin(closed := RecordingSink(), goes_on := RecordingSink())
    host.put(ring, plan, 1)
    host.end(closing=[plan.readings[0].channel])
    told = closed.told
    assert told == (1, 1, 0, {})
    host.put(ring, plan, 2)
    host.count(plan, Counter.HITS, 3)
    host.count(plan, Counter.LOST, 2)
    host.end(plan)
    assert (closed.told, closed.filtered_count) == (told, 0)
    assert goes_on.told == (5, 2, 0, {LossStage.KERNEL_BUFFER: 2, LossStage.DECODE: 1})


def test_stop_ends_the_thread_and_closes_what_it_waited_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors(os.getpid())
    run = Reader._run

    def run_and_linger(reader: Reader) -> None:
        run(reader)
        time.sleep(0.05)

    monkeypatch.setattr(Reader, "_run", run_and_linger)
    host = Host()
    thread = host.reader._thread
    assert thread.is_alive()
    host.reader.stop()
    assert not thread.is_alive()
    assert descriptors(os.getpid()) == before
