"""The reader's thread, over rings in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.encode import Filter
from stapsdtd.capture.bpf.layout import Counter
from stapsdtd.capture.bpf.operands import encode_value
from stapsdtd.capture.bpf.reader import Reader
from stapsdtd.capture.bpf.reading import ActivePlan, Channel, Reading
from stapsdtd.capture.bpf.sources import NumberAt
from stapsdtd.capture.bpf.tables import PlanSpec
from stapsdtd.capture.engine import LossStage
from stapsdtd.model import Memory, Operand
from stapsdtd.plan.values import Value
from stapsdtd.runtime.mailbox import ThreadEndedError
from stapsdtd.runtime.shares import Shares, Toll
from tests.support import wait_for
from tests.unit.fake_bpf import (
    PATIENCE_SECONDS,
    FakeLoaded,
    FakeTables,
    MemoryRing,
    RecordingSink,
    lasting_descriptors,
    record,
    running,
)
from tests.unit.samples import RDI, argument, channels_of

pytestmark = pytest.mark.timeout(60)

THREAD = "stapsdtd-reader"
SMALL, LARGE = layout.STRIDES[0], layout.STRIDES[1]
EVERYTHING = Filter(None, frozenset(), None)
FIRST = NumberAt(0, is_signed=False)


class Host:
    """A reader with its tables, and the kernel's side of both. refuse_paging: what bring_in() raises."""

    def __init__(self, **settings: Any) -> None:
        self.loaded = FakeLoaded()
        self.tables = FakeTables(self.loaded.table, self.loaded.cpus)
        self.brought_in: list[tuple[int, int, int]] = []
        self.refuse_paging: Exception | None = None
        self.reader = Reader(self.tables, self.loaded.set_reader_waits, self.bring_in, **settings)
        self.sink = RecordingSink()
        self._is_stopped = False

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self.reader.stop()

    def close(self) -> None:
        self.stop()
        for ring in self.loaded.made:
            if not ring.is_closed:
                ring.close()

    def bring_in(self, *place: int) -> None:
        if self.refuse_paging is not None:
            raise self.refuse_paging
        pid, address, byte_count = place
        self.brought_in.append((pid, address, byte_count))

    def add_ring(self, stride: int = SMALL, size: int = 4096) -> MemoryRing:
        made = self.loaded.make_ring(stride, size)
        self.reader.add_ring(made)
        return made

    def begin(
        self,
        *sinks: RecordingSink,
        filters: Sequence[Filter] = (EVERYTHING,),
        operand: Operand = RDI,
        number: NumberAt = FIRST,
        clients: Sequence[str] = (),
    ) -> ActivePlan:
        """A plan of one number. The sinks' site_ids are 1, 2, …; each has a filter of its own as far as they last.

        clients: who pays for each.
        """
        value = encode_value(Value(0), argument(operand), "x86-64")
        entry = self.tables.allocate_plan(PlanSpec([value], [], dict(enumerate(filters)), {0: 0}, has_texts=False))
        payers = chain(clients, repeat(""))
        channels = [
            Channel(site_id, sink, client=client)
            for site_id, (sink, client) in enumerate(zip(sinks or (self.sink,), payers, strict=False), 1)
        ]
        readings = tuple(
            Reading(channel, min(channel.subscription_key, len(filters)) - 1, channel.subscription_key, (number,))
            for channel in channels
        )
        tested = sum(1 << bit for bit, wanted in enumerate(filters) if not wanted.accepts_all)
        plan = ActivePlan(entry, channels_of(readings), readings, tested)
        self.reader.begin([plan])
        return plan

    def end(self, *plans: ActivePlan, closing: Sequence[Channel] = ()) -> None:
        self.reader.end(plans, closing).result(PATIENCE_SECONDS)

    def in_reader(self, *jobs: Callable[[], None]) -> None:
        """Do something while it looks at nothing: it takes the plans that it is to begin one by one."""

        def no_plans() -> Iterator[ActivePlan]:
            assert threading.current_thread().name == THREAD
            for each in jobs:
                each()
            yield from ()

        self.reader.begin(no_plans())

    def put(self, ring: MemoryRing, plan: ActivePlan, value: int, *, time_ns: int | None = None, **more: int) -> None:
        """A hit: counted, written, and told to a reader that waits."""
        self.count(plan, Counter.HITS, 1)
        at = time.monotonic_ns() if time_ns is None else time_ns
        assert ring.put(record(ring.stride, plan.entry.generation, value, time_ns=at, **more))
        self.loaded.wake_up(ring)

    def count(self, plan: ActivePlan, counter: Counter, count: int, bit: int = 0, cpu: int = 0) -> None:
        self.loaded.counters()[cpu, plan.entry.cell(counter, bit)] += count

    def forgot(self, *plans: ActivePlan) -> None:
        """Check that records and counts of plans that ended reach nobody."""
        told, unknown = deepcopy(self.sink.told), self.reader.unknown
        ring, known = self.add_ring(), self.begin(sink := RecordingSink())
        for plan in plans:
            self.put(ring, plan, 1)
        self.put(ring, known, 1)
        wait_for(lambda: sink.told == (1, 1, 0, {}), "what is of a known plan")
        assert (self.sink.told, self.reader.unknown) == (told, unknown + len(plans))


@pytest.fixture
def host() -> Iterator[Host]:
    with closing(Host()) as made:
        yield made


@pytest.fixture
def patient() -> Iterator[Host]:
    """Waits long for what wakes it."""
    with closing(Host(idle_seconds=50)) as made:
        yield made


def raising(times: int = 1) -> Callable[[], None]:
    """Something that raises so many times."""
    left = [ZeroDivisionError() for _ in range(times)]

    def fails() -> None:
        if left:
            raise left.pop()

    return fails


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


def test_reader_that_waits_is_woken_by_a_record(patient: Host) -> None:
    host = patient
    ring, plan = host.add_ring(), host.begin()
    for number in range(3):
        wait_for(lambda: host.loaded.reader_waits, "the reader to wait")
        host.put(ring, plan, number)
        wait_for(lambda: len(host.sink.rows) == number + 1, "the event")  # noqa: B023 - called at once
    assert numbers(host.sink) == [0, 1, 2]


def test_record_that_came_before_the_flag_was_seen_is_not_waited_for(patient: Host) -> None:
    host = patient
    ring, plan = host.add_ring(), host.begin()
    late = [7]

    def put_just_before(waits: bool) -> None:
        if waits and late:
            assert ring.put(record(ring.stride, plan.entry.generation, late.pop()))

    host.loaded.before_reader_waits = put_just_before
    host.in_reader()
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


def test_no_ring_goes_beyond_what_was_read_of_one_that_has_more() -> None:
    with closing(Host(rows_per_sweep=4)) as host:
        small, large, plan = host.add_ring(), host.add_ring(LARGE), host.begin()
        start = time.monotonic_ns()

        def put() -> None:
            for number in range(30):
                host.put(small if 2 < number < 25 else large, plan, number, time_ns=start + number)

        host.in_reader(put)
        wait_for(lambda: len(host.sink.rows) == 30, "the events")
        assert numbers(host.sink) == list(range(30))
        assert len(host.sink.calls) > 5


def test_of_several_rings_nothing_is_told_that_is_later_than_the_look_at_them(host: Host) -> None:
    small, large, plan = host.add_ring(), host.add_ring(LARGE), host.begin()
    start = time.monotonic_ns() + 100_000_000
    deliveries: list[int] = []
    host.sink.before_delivery = lambda: deliveries.append(time.monotonic_ns())
    host.in_reader(*(partial(host.put, ring, plan, 1, time_ns=start) for ring in (small, large)))
    wait_for(lambda: len(host.sink.rows) == 2, "the events")
    assert min(deliveries) >= start


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
    host.in_reader()
    host.in_reader()
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


def test_who_is_behind_loses_events_while_a_ring_fills_up_and_nobody_else_does() -> None:
    shares = Shares()
    greedy, modest = RecordingSink(), RecordingSink()
    with closing(Host(toll=Toll(shares, "reading", is_apart=True))) as host:
        plan = host.begin(greedy, modest, clients=["greedy", "modest"])
        few, many = host.add_ring(), host.add_ring()
        shares.charge("greedy", "reading", 100, is_apart=True)
        host.in_reader(partial(host.put, few, plan, 1))
        wait_for(lambda: len(modest.rows) == 1, "the first event")
        assert greedy.values == [(1, 1)], "there is room for more"
        count = many.size // many.stride * 3 // 4
        host.in_reader(*(partial(host.put, many, plan, value) for value in range(count)))
        wait_for(lambda: len(modest.rows) == 1 + count, "the other events")
        assert greedy.losses == {LossStage.QUOTA: count}
        host.in_reader(partial(host.put, few, plan, 2))
        wait_for(lambda: len(modest.rows) == 2 + count, "the last event")
        assert (greedy.values, modest.losses) == ([(1, 1), (1, 2)], {})
        host.end(plan)
        assert (greedy.fired_count, modest.fired_count) == (count + 2, count + 2)
        taken = shares.taken(["greedy", "modest"])
        assert taken["greedy"].seconds["reading"] > 0
        assert taken["modest"].seconds["reading"] > 0


def test_nobody_is_behind_who_is_alone() -> None:
    shares = Shares()
    with closing(Host(toll=Toll(shares, "reading", is_apart=True))) as host:
        plan = host.begin(sink := RecordingSink(), clients=["greedy"])
        ring = host.add_ring()
        shares.charge("greedy", "reading", 100, is_apart=True)
        count = ring.size // ring.stride * 3 // 4
        host.in_reader(*(partial(host.put, ring, plan, value) for value in range(count)))
        wait_for(lambda: len(sink.rows) == count, "the events")
        assert sink.losses == {}


def test_counters_are_told_exactly_over_all_cpus_while_it_runs(host: Host) -> None:
    plan = host.begin()
    host.in_reader(
        partial(host.count, plan, Counter.LOST, 3, cpu=0),
        partial(host.count, plan, Counter.LOST, 4, cpu=1),
        partial(host.count, plan, Counter.FILTERED, 50, cpu=1),
        partial(host.count, plan, Counter.EXCLUDED, 600),
        # of one filter, the others are not counted again
        partial(host.count, plan, Counter.HITS, 7),
    )
    expected = {LossStage.KERNEL_BUFFER: 7}, 50
    wait_for(lambda: (host.sink.losses, host.sink.filtered_count) == expected, "the figures")
    host.count(plan, Counter.LOST, 1)
    host.count(plan, Counter.HITS, 1)
    wait_for(lambda: host.sink.losses == {LossStage.KERNEL_BUFFER: 8}, "the next loss")
    host.count(plan, Counter.FILTERED, 2)
    host.end(plan)
    assert (host.sink.losses, host.sink.filtered_count) == ({LossStage.KERNEL_BUFFER: 8}, 52)
    assert host.sink.fired_count == 8 + 52


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

    host.in_reader(put)
    over = host.reader.end([ended], [])
    host.reader.end([later], []).add_done_callback(lambda _: completes.append(lambda: None))
    host.in_reader()
    # others' records are delivered, and what they fired is told
    host.put(large, other, 3)
    wait_for(lambda: numbers(host.sink) == [3] and host.sink.fired_count == 4, "what is not behind it")
    host.in_reader()
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
    host.forgot(plan)
    assert host.sink.told == (0, 0, 0, {})
    wait_for(lambda: "1 records name plans that are not known" in caplog.text, "the log")


def test_thread_that_ends_leaves_nobody_waiting_for_an_ending(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    ring.put_busy(record(ring.stride, plan.entry.generation, 1))
    over = host.reader.end([plan], [])
    host.in_reader()
    host.stop()
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
    host.refuse_paging = RuntimeError("can't start new thread")
    ring, plan = host.add_ring(), host.begin(operand=Memory("rsp", 8))
    host.put(ring, plan, layout.UNREAD_OPERAND, missing=1)
    host.end(plan)
    assert (numbers(host.sink), host.sink.told) == ([None], (1, 1, 0, {}))
    assert "can't start new thread" in caplog.text


class RefusingSink(RecordingSink):
    def fired(self, count: int) -> None:
        super().fired(count)
        raise ZeroDivisionError


def test_sink_that_raises_does_not_hold_up_an_ending(host: Host) -> None:
    plan, other = host.begin(refusing := RefusingSink()), host.begin(sink := RecordingSink())
    host.count(plan, Counter.HITS, 1)
    host.count(other, Counter.HITS, 1)
    host.count(other, Counter.LOST, 1)
    host.end(plan)
    host.end(other)
    assert sink.told == (1, 0, 0, {LossStage.KERNEL_BUFFER: 1})
    host.forgot(plan, other)
    assert (refusing.fired_count, sink.told) == (1, (1, 0, 0, {LossStage.KERNEL_BUFFER: 1}))


def test_what_was_counted_and_never_came_is_lost(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    for counter, count in ((Counter.HITS, 6), (Counter.FILTERED, 3), (Counter.EXCLUDED, 1), (Counter.LOST, 2)):
        host.count(plan, counter, count)
    assert ring.put(record(ring.stride, plan.entry.generation, 5))
    host.end(plan)
    assert host.sink.losses == {LossStage.KERNEL_BUFFER: 2, LossStage.DECODE: 3}
    assert (host.sink.filtered_count, numbers(host.sink)) == (3, [5])


def test_last_figures_that_cannot_be_had_do_not_hold_up_an_ending(host: Host) -> None:
    plan, channel = host.begin(), Channel(1, host.sink)
    host.tables.refuse_totals = MemoryError()
    host.end(plan, closing=[channel])
    host.tables.refuse_totals = None
    assert not channel.is_open
    host.forgot(plan)


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
    assert [thread.name for thread in done] == [THREAD] * 3
    assert len(set(done)) == 1


def test_jobs_are_done_while_events_come_without_end(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    host.sink.before_delivery = lambda: host.put(ring, plan, 1)
    host.put(ring, plan, 1)
    wait_for(lambda: len(host.sink.rows) > 5, "events")
    host.in_reader()
    host.sink.before_delivery = lambda: None


def test_what_a_job_raises_reaches_the_caller_and_the_thread_goes_on(host: Host) -> None:
    with pytest.raises(ZeroDivisionError):
        host.in_reader(raising())
    ring, plan = host.add_ring(), host.begin()
    host.put(ring, plan, 1)
    wait_for(lambda: numbers(host.sink) == [1], "the event")


def test_sink_that_raises_loses_its_own_events_and_no_others(host: Host) -> None:
    bad, good = RecordingSink(), RecordingSink()
    ring, plan = host.add_ring(), host.begin(bad, good)
    bad.before_delivery = raising(4)
    host.in_reader(*(partial(host.put, ring, plan, number) for number in range(4)))
    wait_for(lambda: len(good.rows) == 4 and bad.losses == {LossStage.DECODE: 4}, "the events and the loss")
    bad.before_delivery = lambda: None
    host.put(ring, plan, 5)
    host.end(plan)
    assert (numbers(bad), numbers(good)) == ([5], [0, 1, 2, 3, 5])
    assert (bad.losses, good.losses) == ({LossStage.DECODE: 4}, {})


def test_records_that_cannot_be_decoded_are_lost_when_their_plan_ends(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    ring.before_raw = raising()
    host.in_reader(*(partial(host.put, ring, plan, number) for number in range(3)))
    wait_for(lambda: not ring.filled, "the failure")
    host.put(ring, plan, 3)
    wait_for(lambda: numbers(host.sink) == [3], "the next event")
    host.end(plan)
    assert host.sink.losses == {LossStage.DECODE: 3}


def test_failing_sweep_does_not_end_the_thread(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    ring, plan = host.add_ring(), host.begin()
    ring.before_peek = raising()
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


def test_record_that_stays_busy_does_not_make_the_reader_spin(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    complete = ring.put_busy(record(ring.stride, plan.entry.generation, 1, time_ns=time.monotonic_ns()))
    host.count(plan, Counter.HITS, 1)
    sweeps: list[None] = []
    begin = time.monotonic()
    ring.before_peek = lambda: sweeps.append(None)
    host.in_reader()
    wait_for(lambda: len(sweeps) >= 20, "some sweeps")
    # a millisecond each, whatever else the host does
    assert time.monotonic() - begin > 0.01
    complete()
    wait_for(lambda: numbers(host.sink) == [1], "the event")


def test_of_one_ring_nothing_is_told_that_is_later_than_the_look_at_all(host: Host) -> None:
    small, large = host.add_ring(), host.add_ring(LARGE)
    plan = host.begin()
    pending = [1]

    def hit_late() -> None:
        # a hit goes to the ring that was looked at already, and then one to this
        if pending:
            pending.pop()
            host.put(small, plan, 1)
            host.put(large, plan, 2)

    large.before_peek = hit_late
    host.in_reader()
    wait_for(lambda: len(host.sink.rows) == 2, "the events")
    assert numbers(host.sink) == [1, 2]


def test_other_rings_wait_for_what_is_behind_a_record_that_is_being_written(host: Host) -> None:
    """As when a return goes to another ring than its entry, before which another CPU began a record."""
    small, large = host.add_ring(), host.add_ring(LARGE)
    plan = host.begin()
    completes: list[Callable[[], None]] = []

    def begin() -> None:
        completes.append(large.put_busy(record(LARGE, plan.entry.generation, 1, time_ns=time.monotonic_ns())))

    sweeps: list[None] = []
    host.in_reader(begin, partial(host.put, large, plan, 2), partial(host.put, small, plan, 3))
    small.before_peek = lambda: sweeps.append(None)
    wait_for(lambda: len(sweeps) >= 3, "some sweeps")
    assert numbers(host.sink) == []
    completes[0]()
    wait_for(lambda: len(host.sink.rows) == 3, "the events")
    assert numbers(host.sink) == [1, 2, 3]


def test_a_record_that_stays_busy_holds_up_its_own_ring_alone(host: Host) -> None:
    small, large = host.add_ring(), host.add_ring(LARGE)
    plan = host.begin()
    complete = large.put_busy(record(LARGE, plan.entry.generation, 1, time_ns=time.monotonic_ns()))
    for number in range(2, 5):
        host.put(small, plan, number)
        wait_for(lambda: len(host.sink.rows) == number - 1, "the event of the other ring")  # noqa: B023 - at once
    complete()
    wait_for(lambda: numbers(host.sink) == [2, 3, 4, 1], "the event")


def test_records_that_cannot_be_made_columns_are_lost_when_their_plan_ends(host: Host) -> None:
    # a value that no record has
    ring, plan = host.add_ring(), host.begin(number=replace(FIRST, position=layout.MAX_VALUES))
    host.in_reader(*(partial(host.put, ring, plan, number) for number in range(3)))
    wait_for(lambda: not ring.filled, "the records to be read")
    host.end(plan)
    assert (len(host.sink.rows), host.sink.losses) == (0, {LossStage.DECODE: 3})


def test_sink_that_raises_loses_what_was_for_it_and_not_what_was_left_out(host: Host) -> None:
    ring, plan = host.add_ring(), host.begin()
    plan.readings[0].channel.excluded = frozenset({8})
    host.sink.before_delivery = raising()
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


def test_stop_ends_the_thread_and_closes_what_it_waited_on() -> None:
    before = lasting_descriptors(), running(THREAD)
    host = Host()
    (thread,) = set(running(THREAD)) - set(before[1])
    ring, plan = host.add_ring(), host.begin()
    ring.put_busy(record(ring.stride, plan.entry.generation, 1))
    # the last thing that the thread does
    host.reader.end([plan], []).add_done_callback(lambda _: time.sleep(0.05))
    host.stop()
    assert not thread.is_alive()
    assert ring.is_closed
    assert (lasting_descriptors(), running(THREAD)) == before
