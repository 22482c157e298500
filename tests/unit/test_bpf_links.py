"""The bpf engine where the kernel links programs to uprobes, also of single processes where perf is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.model import Register
from stapsdtd.plan.attachments import Choice
from tests.unit.bpf_rig import (
    FOUND,
    LINKS_BY_PID,
    LINKS_FOR_ALL,
    LINKS_SHARED,
    A,
    B,
    C,
    Traffic,
    closed,
    free,
    made_engine,
    nothing_is_left,
    opened,
    quiesced,
    refused,
    rejecting,
    target,
)
from tests.unit.fake_bpf import FakeKernel, RecordingSink
from tests.unit.samples import argument, sample_object, site


@pytest.fixture
def engine(kernel: FakeKernel) -> Iterator[BpfEngine]:
    made = made_engine(kernel, choice=LINKS_FOR_ALL)
    yield made
    made.shutdown()


@pytest.fixture
def by_pid(kernel: FakeKernel) -> Iterator[BpfEngine]:
    """Where perf events are refused."""
    made = made_engine(kernel, choice=LINKS_BY_PID)
    yield made
    made.shutdown()


@pytest.fixture
def sink(engine: BpfEngine) -> RecordingSink:
    return opened(engine, 1)


@pytest.fixture
def other(engine: BpfEngine) -> RecordingSink:
    return opened(engine, 2)


def test_all_processes_are_armed_by_a_link(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    before = free(kernel, engine)
    assert engine.arm(1, target(kernel, A, B)) == []
    assert kernel.steps() == ["define l0 0x10", "define l0 0x1020", "arm l0 None"]
    kernel.hit(A.site_offset, rdi=1)
    kernel.hit(B.site_offset, rsi=2)
    closed(engine, 1)
    assert sink.values == [(1, 1), (2, 2)]
    assert kernel.steps() == ["remove l0"]
    nothing_is_left(engine, kernel, before)


def test_sites_of_equal_page_offsets_share_a_link(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    sites = [site(f"s{number}", 0x1000 * number + 0x10, [argument(Register("rdi"))]) for number in range(3)]
    assert engine.arm(1, target(kernel, of=sample_object(*sites))) == []
    assert engine.metrics().groups == 1
    for each in sites:
        kernel.hit(each.site_offset, rdi=each.site_offset)
    closed(engine, 1)
    assert sink.values == [(1, 0x10), (2, 0x1010), (3, 0x2010)]


def test_single_processes_are_armed_by_an_event(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    assert engine.arm(1, target(kernel, A, pids={7})) == []
    assert kernel.steps() == ["define g0 0x10", "arm g0 7"]
    kernel.hit(A.site_offset, pid=7)
    kernel.hit(A.site_offset, pid=8)
    closed(engine, 1)
    assert sink.pids == [7]


def test_no_hit_is_missed_or_doubled_when_a_scope_grows_and_shrinks(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    before = free(kernel, engine)
    engine.arm(1, target(kernel, A, pids={10}))
    traffic = Traffic(kernel, (A, 10))
    engine.arm(2, target(kernel, A))
    assert list(kernel.events) == ["l0"]
    traffic.fire()
    told = traffic.fired
    engine.disarm(2, FOUND)
    assert list(kernel.events) == ["g1"]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert other.values[-1][1] >= told - 1
    closed(engine, 1)
    closed(engine, 2)
    nothing_is_left(engine, kernel, before)


def test_refused_sites_are_found_by_halving(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    kernel.fail = rejecting("0x1020")
    assert list(refused(engine.arm(1, target(kernel, A, B)))) == ["b"]
    kernel.hit(A.site_offset, rdi=5)
    closed(engine, 1)
    assert sink.values == [(1, 5)]


def test_single_processes_are_armed_by_a_link_each(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    sink, before = opened(by_pid, 1), free(kernel, by_pid)
    assert by_pid.arm(1, target(kernel, A, B, pids={7, 9})) == []
    assert kernel.steps() == ["define l0 0x10", "define l0 0x1020", "arm l0 7", "arm l0 9"]
    for pid in (7, 8, 9):
        kernel.hit(A.site_offset, pid=pid)
    closed(by_pid, 1)
    assert sink.pids == [7, 9]
    nothing_is_left(by_pid, kernel, before)


@pytest.mark.parametrize("choice", [LINKS_BY_PID, LINKS_SHARED])
def test_no_hit_is_missed_or_doubled_when_pids_come_and_go(kernel: FakeKernel, choice: Choice) -> None:
    engine = made_engine(kernel, choice=choice)
    sink, other = opened(engine, 1), opened(engine, 2)
    before = free(kernel, engine)
    engine.arm(1, target(kernel, A, pids={10}))
    traffic = Traffic(kernel, (A, 10))
    engine.arm(2, target(kernel, A, pids={10, 11}))
    assert len(kernel.events) == 1
    engine.disarm(2, FOUND)
    engine.arm(2, target(kernel, A))
    engine.disarm(2, FOUND)
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert set(other.pids) == {10}
    closed(engine, 1)
    closed(engine, 2)
    nothing_is_left(engine, kernel, before)
    engine.shutdown()


def test_shared_link_serves_all_scopes(kernel: FakeKernel) -> None:
    """Where the kernel has no exact links for single processes, the program tells them apart."""
    engine = made_engine(kernel, choice=LINKS_SHARED)
    sink = opened(engine, 1)
    assert engine.arm(1, target(kernel, A, pids={7, 9})) == []
    assert kernel.scopes == {"l0": {None}}
    for pid in (7, 8, 9):
        kernel.hit(A.site_offset, pid=pid)
    closed(engine, 1)
    assert sink.pids == [7, 9]
    engine.shutdown()


def test_process_without_a_main_thread_has_a_link_for_all(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    opened(by_pid, 2)
    sink, before = opened(by_pid, 1), free(kernel, by_pid)
    kernel.without_main_thread = {9}
    assert by_pid.arm(2, target(kernel, A, pids={7})) == []
    assert by_pid.arm(1, target(kernel, B, pids={7, 9})) == []
    assert kernel.scopes == {"l0": {7}, "l1": {None}}
    for pid in (7, 8, 9):
        kernel.hit(B.site_offset, pid=pid)
    closed(by_pid, 1)
    closed(by_pid, 2)
    assert sink.pids == [7, 9]
    nothing_is_left(by_pid, kernel, before)


def test_link_is_replaced_when_the_main_thread_ends(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    sink, other = opened(by_pid, 1), opened(by_pid, 2)
    before = free(kernel, by_pid)
    by_pid.arm(1, target(kernel, A, B, pids={10, 11}))
    by_pid.arm(2, target(kernel, C, pids={12}))
    traffic = Traffic(kernel, (A, 10), (A, 11))
    kernel.without_main_thread = {10}
    by_pid.renew(10)
    assert kernel.scopes == {"l1": {12}, "l2": {None}}
    by_pid.renew(10)
    assert kernel.scopes == {"l1": {12}, "l2": {None}}
    # another thread executed a program, and is the main one now
    kernel.without_main_thread = set()
    by_pid.renew(12)
    assert kernel.scopes == {"l2": {None}, "l3": {12}}
    traffic.fire()
    quiesced(by_pid)
    assert sink.values == [(1, number // 2) for number in range(2 * traffic.fired)]
    assert other.values == []
    closed(by_pid, 1)
    closed(by_pid, 2)
    nothing_is_left(by_pid, kernel, before)


def test_link_stays_where_its_like_is_refused(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    sink = opened(by_pid, 1)
    by_pid.arm(1, target(kernel, A, pids={10}))
    kernel.fail = rejecting("arm l1")
    by_pid.renew(10)
    kernel.hit(A.site_offset, pid=10, rdi=3)
    kernel.fail = lambda _step: None
    by_pid.renew(10)
    assert kernel.scopes == {"l2": {10}}
    kernel.hit(A.site_offset, pid=10, rdi=4)
    closed(by_pid, 1)
    assert sink.values == [(1, 3), (1, 4)]
