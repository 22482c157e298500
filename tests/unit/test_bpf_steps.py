"""What is armed and closed in steps is exact, whatever others do in between."""

from __future__ import annotations

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.runtime import slices
from stapsdtd.runtime.fair_thread import finish
from tests.support import wait_for
from tests.unit.bpf_rig import A, B, C, closed, free, opened, target
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeKernel, RecordingSink, descriptors_of


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
