"""What is armed and closed in steps is exact, whatever others do in between."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.model import Constant
from stapsdtd.runtime import slices
from stapsdtd.runtime.fair_thread import finish
from tests.support import wait_for
from tests.unit.bpf_rig import (
    LINKS_BY_PID,
    LINKS_FOR_ALL,
    A,
    B,
    C,
    closed,
    free,
    made_engine,
    nothing_is_left,
    opened,
    refused,
    target,
)
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeKernel, RecordingSink, descriptors_of
from tests.unit.samples import argument, sample_object, site


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TURN_SECONDS", 0.0)


def test_nothing_is_armed_before_the_last_step(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    steps = engine.arm_in_steps(1, target(kernel, A, B))
    next(steps)
    next(steps)
    assert not kernel.events
    assert finish(steps) == []
    kernel.hit(A.site_offset)
    kernel.hit(B.site_offset)
    closed(engine, 1)
    assert len(sink.rows) == 2


def test_others_arm_and_disarm_the_same_sites_between_steps(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    staying, leaving = opened(engine, 2), opened(engine, 3)
    wanted = target(kernel, A, B)
    engine.arm(3, wanted)
    steps = engine.arm_in_steps(1, wanted)
    next(steps)
    engine.disarm(3, wanted.object)
    next(steps)
    engine.arm(2, wanted)
    finish(steps)
    kernel.hit(A.site_offset)
    kernel.hit(B.site_offset)
    for subscription_key in (1, 2, 3):
        closed(engine, subscription_key)
    assert [len(each.rows) for each in (sink, staying, leaving)] == [2, 2, 0]


def test_arming_that_is_given_up_leaves_nothing(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    before = free(kernel, engine)
    steps = engine.arm_in_steps(1, target(kernel, A, B))
    next(steps)
    closed(engine, 1)
    steps.close()
    assert free(kernel, engine) == before
    wait_for(lambda: descriptors_of(kernel.path) == 0, "the file to be closed")
    assert not sink.values


def test_closing_disarms_some_sites_in_each_step(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stapsdtd.capture.bpf.engine._RELEASED_AT_ONCE", 1)
    for each in (A, B, C):
        engine.arm(1, target(kernel, each))
    other = opened(engine, 2)
    steps = engine.close_in_steps(1)
    next(steps)
    kernel.hit(A.site_offset)
    kernel.hit(C.site_offset)
    engine.arm(2, target(kernel, C))
    kernel.hit(C.site_offset)
    finish(steps).result(PATIENCE_SECONDS)
    closed(engine, 2)
    assert [value[0] for value in sink.values] == [3, 3]
    assert len(other.rows) == 1


@pytest.fixture
def by_pid(kernel: FakeKernel) -> Iterator[BpfEngine]:
    made = made_engine(kernel, choice=LINKS_BY_PID)
    yield made
    made.shutdown()


def hit_in(kernel: FakeKernel, *pids: int) -> None:
    for pid in pids:
        kernel.hit(A.site_offset, pid=pid)


def test_processes_of_a_scope_are_patched_in_steps(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    before, sink = free(kernel, by_pid), opened(by_pid, 1)
    steps = by_pid.arm_in_steps(1, target(kernel, A, pids={10, 11, 12}))
    next(steps)
    next(steps)
    assert kernel.scopes == {"l0": {10}}
    hit_in(kernel, 10, 11)
    next(steps)
    assert kernel.scopes == {"l0": {10, 11}}
    assert finish(steps) == []
    hit_in(kernel, 10, 11, 12, 13)
    closed(by_pid, 1)
    assert sink.pids == [10, 10, 11, 12]
    nothing_is_left(by_pid, kernel, before)


def test_a_group_is_detached_once_the_one_in_its_place_patches_all_that_it_is_to(
    kernel: FakeKernel, by_pid: BpfEngine
) -> None:
    before, staying, leaving = free(kernel, by_pid), opened(by_pid, 1), opened(by_pid, 2)
    by_pid.arm(2, target(kernel, A))
    finish(by_pid.arm_in_steps(1, target(kernel, A, pids={10, 11, 12})))
    assert kernel.scopes == {"l0": {None}}
    steps = by_pid.close_in_steps(2)
    hits = 0
    with contextlib.suppress(StopIteration):
        while True:
            next(steps)
            hit_in(kernel, 10, 11, 12)
            hits += 1
    assert hits >= 3
    wait_for(lambda: kernel.scopes == {"l1": {10, 11, 12}}, "the link for all processes to be closed")
    hit_in(kernel, 10, 11, 12, 13)
    closed(by_pid, 1)
    assert sorted(staying.pids) == sorted([10, 11, 12] * (hits + 1))
    assert not leaving.rows
    nothing_is_left(by_pid, kernel, before)


def test_a_group_that_is_replaced_patches_nothing_more(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    some, everybody = opened(by_pid, 1), opened(by_pid, 2)
    steps = by_pid.arm_in_steps(1, target(kernel, A, pids={10, 11, 12}))
    next(steps)
    next(steps)
    by_pid.arm(2, target(kernel, A))
    assert finish(steps) == []
    assert not any(step.startswith("arm l0 1") and step != "arm l0 10" for step in kernel.steps())
    hit_in(kernel, 10, 11, 12, 13)
    closed(by_pid, 1)
    closed(by_pid, 2)
    assert (some.pids, everybody.pids) == ([10, 11, 12], [10, 11, 12, 13])


def test_sites_that_are_not_patched_in_all_processes_are_refused(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    before, sink, other = free(kernel, by_pid), opened(by_pid, 1), opened(by_pid, 2)
    by_pid.arm(2, target(kernel, B, pids={12}))
    kernel.fail = lambda step: OSError(errno.ENOMEM, "no memory") if step == "arm l1 12" else None
    answer = finish(by_pid.arm_in_steps(1, target(kernel, A, B, pids={10, 11, 12})))
    # the link that is there already patches the others
    assert refused(answer) == {"a": "[Errno 12] no memory"}
    kernel.fail = lambda _: None
    kernel.hit(A.site_offset, pid=10)
    kernel.hit(B.site_offset, pid=12)
    closed(by_pid, 1)
    closed(by_pid, 2)
    assert ([value[0] for value in sink.values], len(other.rows)) == ([2], 1)
    nothing_is_left(by_pid, kernel, before)


def test_process_whose_main_thread_ends_meanwhile_is_traced(kernel: FakeKernel, by_pid: BpfEngine) -> None:
    before, sink = free(kernel, by_pid), opened(by_pid, 1)
    steps = by_pid.arm_in_steps(1, target(kernel, A, pids={10, 11, 12}))
    next(steps)
    next(steps)
    kernel.without_main_thread.add(12)
    assert finish(steps) == []
    hit_in(kernel, 10, 11, 12, 13)
    closed(by_pid, 1)
    assert sink.pids == [10, 11, 12]
    nothing_is_left(by_pid, kernel, before)


def test_arming_that_is_given_up_while_processes_are_patched_leaves_nothing(
    kernel: FakeKernel, by_pid: BpfEngine
) -> None:
    before = free(kernel, by_pid)
    opened(by_pid, 1)
    wanted = target(kernel, A, pids={10, 11, 12})
    steps = by_pid.arm_in_steps(1, wanted)
    next(steps)
    next(steps)
    by_pid.disarm(1, wanted.object)
    steps.close()
    assert not kernel.events
    closed(by_pid, 1)
    nothing_is_left(by_pid, kernel, before)


def test_a_link_takes_fewer_sites_if_the_last_one_took_long(kernel: FakeKernel) -> None:
    engine = made_engine(kernel, choice=LINKS_FOR_ALL)
    sink = opened(engine, 1)
    found = sample_object(*(site(f"n{number}", number, [argument(Constant(number))]) for number in range(1040)))
    assert finish(engine.arm_in_steps(1, target(kernel, of=found))) == []
    assert [len(event.places) for event in kernel.events.values()] == [1000, 16, 16, 8]
    for each in found.parsed.sites:
        kernel.hit(each.site_offset)
    closed(engine, 1)
    assert [value[1] for value in sink.values] == list(range(1040))
    engine.shutdown()
