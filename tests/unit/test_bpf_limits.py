"""What does not fit: records, filters, tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.model import Capture, Register
from tests.unit.bpf_rig import (
    TABLES,
    A,
    B,
    C,
    closed,
    free,
    give_back,
    nothing_is_left,
    opened,
    pool,
    quiesced,
    refused,
    take_all,
    taking,
    target,
    where,
    wide,
)
from tests.unit.fake_bpf import FakeKernel, RecordingSink
from tests.unit.samples import argument, sample_object, site

pytestmark = pytest.mark.timeout(60)


def test_more_values_than_a_record_holds_are_refused(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    before = free(kernel, engine)
    fits, exceeds = wide(1, 32, "fits"), wide(2, 33, "exceeds")
    found = sample_object(fits, exceeds)
    assert refused(engine.arm(1, target(kernel, of=found))) == {
        "exceeds": "its captures take 33 values, and a record holds at most 32"
    }
    assert kernel.steps() == ["define g0 0x10", "arm g0 None"]
    kernel.hit(0x10, rdi=3)
    closed(engine, 1)
    assert sink.values == [(1, *[3] * 32)]
    nothing_is_left(engine, kernel, before)


def test_values_of_several_subscriptions_count_together(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    both = wide(1, 40)
    found = sample_object(both)
    assert engine.arm(1, taking(kernel, both, *(Capture(index) for index in range(20)), of=found)) == []
    late = taking(kernel, both, *(Capture(index) for index in range(20, 40)), of=found)
    assert refused(engine.arm(2, late)) == {"a": "its captures take 40 values, and a record holds at most 32"}
    kernel.hit(0x10, rdi=3)
    closed(engine, 2)
    closed(engine, 1)
    assert (sink.values, other.values) == ([(1, *[3] * 20)], [])


def test_strings_that_do_not_fit_a_record_are_refused(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    before = free(kernel, engine)
    both = wide(1, 16)
    found = sample_object(both)
    strings = [Capture(index, is_string=True) for index in range(16)]
    most, possible = layout.RECORD.itemsize + 16 * 8 + 16 * 4097, 65536 - 8 - 4097 - 1
    reason = refused(engine.arm(1, taking(kernel, both, *strings, of=found)))["a"]
    assert reason == f"its captures take up to {most} bytes, and a record holds at most {possible}"
    nothing_is_left(engine, kernel, before)
    assert engine.arm(1, taking(kernel, both, *strings[:14], of=found)) == []
    kernel.memory[0x5000] = b"x" * 4096
    kernel.hit(0x10, rdi=0x5000)
    closed(engine, 1)
    assert sink.values == [(1, *[b"x" * 4096] * 14)]


def test_more_filters_than_a_plan_has_bits_are_refused(kernel: FakeKernel, engine: BpfEngine) -> None:
    sinks = [opened(engine, subscription_key) for subscription_key in range(layout.MAX_FILTERS + 1)]
    *fit, last = range(layout.MAX_FILTERS + 1)
    for subscription_key in fit:
        assert engine.arm(subscription_key, target(kernel, A, pids={100 + subscription_key})) == []
    assert refused(engine.arm(last, target(kernel, A, pids={100 + last}))) == {
        "a": "the bpf engine cannot run that many tests at a site; distinct filters: 65"
    }
    # as one that is there already, it fits
    assert engine.arm(last, target(kernel, A, pids={100})) == []
    kernel.hit(A.site_offset, pid=100)
    kernel.hit(A.site_offset, pid=163)
    quiesced(engine)
    assert [subscription_key for subscription_key, sink in enumerate(sinks) if sink.rows] == [0, 63, 64]


def test_more_tests_than_a_hit_may_take_are_refused(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    before = free(kernel, engine)
    reason = "the bpf engine cannot run that many tests at a site; distinct filters: 1"
    many = frozenset(range(1000, 1000 + layout.MAX_STEPS + 1))
    assert refused(engine.arm(1, target(kernel, A, exclude_pids=many))) == {"a": reason}
    nothing_is_left(engine, kernel, before)
    assert sink.rows == []


@pytest.mark.parametrize("name", TABLES)
def test_full_table_is_a_refusal_that_leaves_nothing(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, name: str
) -> None:
    everything = take_all(pool(kernel, name))
    before = free(kernel, engine)
    wanted = target(kernel, A, B, pids={10})
    reason = f"the bpf engine's table of {TABLES[name]} is full"
    assert refused(engine.arm(1, wanted)) == {"a": reason, "b": reason}
    nothing_is_left(engine, kernel, before)
    give_back(pool(kernel, name), everything)
    assert engine.arm(1, wanted) == []
    kernel.hit(B.site_offset, rsi=4)
    closed(engine, 1)
    assert sink.values == [(2, 4)]


@pytest.mark.usefixtures("sink")
def test_as_many_sites_are_armed_as_there_is_room_for(kernel: FakeKernel, engine: BpfEngine) -> None:
    take_all(slots := pool(kernel, "slots"))
    slots.free(1, 2)
    refusals = engine.arm(1, target(kernel))
    assert refused(refusals) == {"c": "the bpf engine's table of sites is full"}
    assert kernel.steps() == ["define g0 0x10", "define g0 0x1020", "arm g0 None"]


@pytest.mark.parametrize("name", ["plans", "counters", "tests"])
def test_full_table_costs_the_newcomer_alone(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, name: str
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    everything = take_all(pool(kernel, name))
    assert list(refused(engine.arm(2, target(kernel, A, pids={7}, predicate=where("arg0 == 1"))))) == ["a"]
    kernel.hit(A.site_offset, pid=7, rdi=1)
    give_back(pool(kernel, name), everything)
    closed(engine, 2)
    closed(engine, 1)
    assert (sink.values, other.values, sink.losses) == ([(1, 1)], [], {})


def test_predicate_that_does_not_fit_a_site_is_refused_with_the_reason(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    refusals = engine.arm(1, target(kernel, predicate=where("arg0 == 1")))
    assert refused(refusals) == {"c": "it has 0 arguments, so there is no arg0 to filter by"}
    kernel.hit(A.site_offset, rdi=1)
    kernel.hit(B.site_offset, rsi=2)
    kernel.hit(C.site_offset)
    closed(engine, 1)
    assert (sink.values, sink.filtered_count) == ([(1, 1)], 1)


def test_predicate_on_a_register_that_is_not_saved_is_refused(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    before = free(kernel, engine)
    found = sample_object(site("a", 0x10, [argument(Register("xmm0"))]))
    refusals = engine.arm(1, target(kernel, of=found, predicate=where("arg0 == 1")))
    assert refused(refusals) == {"a": "%xmm0 is no register of x86-64 that the kernel saves at a probe"}
    nothing_is_left(engine, kernel, before)
    assert sink.rows == []


def test_part_of_a_site_is_kept_for_who_may_trace_everybody(kernel: FakeKernel, engine: BpfEngine) -> None:
    for number in range(64):
        opened(engine, number, 1)
        wanted = replace(target(kernel, A, predicate=where(f"arg0 == {number}")), owners=frozenset({1000}))
        reasons = refused(engine.arm(number, wanted))
        assert ("may not trace everybody's" in reasons.get("a", "")) == (number >= 48), number
    for number in range(100, 116):
        opened(engine, number, 1)
        assert engine.arm(number, target(kernel, A, predicate=where(f"arg0 == {number}"))) == []
