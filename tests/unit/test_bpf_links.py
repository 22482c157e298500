"""The bpf engine where the kernel links programs to uprobes of all processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.model import Register
from tests.unit.bpf_rig import (
    FOUND,
    A,
    B,
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
    made = made_engine(kernel, has_links=True)
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
