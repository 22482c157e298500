"""What several subscriptions want of one site, in one plan."""

from __future__ import annotations

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.events.columns import CUT
from stapsdtd.model import BuiltIn, Capture, Constant, Memory, Register, Unavailable
from tests.unit.bpf_rig import A, B, C, Traffic, closed, quiesced, taking, target, where
from tests.unit.fake_bpf import GID, UID, FakeKernel, RecordingSink
from tests.unit.samples import argument, predicated, sample_object, site

pytestmark = pytest.mark.timeout(60)


def test_second_subscription_of_a_site_arms_nothing(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel))
    kernel.hit(A.site_offset, rdi=1)
    kernel.steps()
    assert engine.arm(2, target(kernel, B, A)) == []
    assert kernel.steps() == []
    kernel.hit(A.site_offset, rdi=2)
    kernel.hit(C.site_offset)
    closed(engine, 2)
    assert kernel.steps() == []
    kernel.hit(A.site_offset, rdi=3)
    closed(engine, 1)
    assert sorted(sink.values) == [(1, 1), (1, 2), (1, 3), (3,)]
    assert other.values == [(1, 2)]
    assert sink.losses == other.losses == {}


def test_subscriptions_take_different_values_of_one_record(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    arguments = [argument(Register("rdi"), 4, signed=True), argument(Register("rsi")), argument(Constant(9))]
    both = site("a", 0x10, [*arguments, argument(Unavailable("no way")), argument(Register("xmm0"))])
    found = sample_object(both)
    kernel.memory[0x5000] = b"a long string"
    text = Capture(1, is_string=True, max_bytes=6)
    assert engine.arm(1, taking(kernel, both, Capture(2), text, Capture(0), of=found)) == []
    longer = Capture(1, is_string=True, max_bytes=100)
    unfit = Capture(3, is_string=True)
    assert engine.arm(2, taking(kernel, both, longer, Capture(1), Capture(3), Capture(4), unfit, of=found)) == []
    kernel.hit(0x10, rdi=(1 << 32) - 2, rsi=0x5000)
    closed(engine, 1)
    closed(engine, 2)
    assert sink.values == [(1, 9, b"a long" + CUT, -2)]
    assert other.values == [(1, b"a long string", 0x5000, None, None, None)]


def test_buffers_are_read_as_a_whole_or_not_at_all(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    """Whatever else is wanted of what the argument points to."""
    found = sample_object(only := site("a", 0x10, [argument(Register("rdi"))]))
    kernel.memory |= {0x5000: b"a\0buffer", 0x6000: b"a page"}
    short, long = (Capture(0, is_buffer=True, max_bytes=size) for size in (4, 8))
    assert engine.arm(1, taking(kernel, only, short, Capture(0), of=found)) == []
    text = Capture(0, is_string=True, max_bytes=8)
    assert engine.arm(2, taking(kernel, only, long, text, short, of=found)) == []
    kernel.hit(0x10, rdi=0x5000)
    kernel.hit(0x10, rdi=0x6000)
    kernel.hit(0x10, rdi=0)
    closed(engine, 1)
    closed(engine, 2)
    assert sink.values == [(1, b"a\0bu", 0x5000), (1, b"a pa", 0x6000), (1, None, 0)]
    assert other.values == [(1, b"a\0buffer", b"a", b"a\0bu"), (1, None, b"a page", b"a pa"), (1, None, None, None)]


def test_built_ins_are_values_like_arguments(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    """Between those that tests read and the address of the hit, each where its reader expects it."""
    found = sample_object(only := site("a", 0x10, [argument(Memory("rsp", 8)), argument(Register("rdi"))]))
    captures = [Capture(BuiltIn.GID), Capture(0), Capture(BuiltIn.UID)]
    wanted = taking(kernel, only, *captures, of=found)
    assert engine.arm(1, predicated(wanted, where("arg1 == 3"))) == []
    kernel.memory[0x1008] = (77).to_bytes(8, "little")
    kernel.hit(0x10, rsp=0x1000, rdi=2)
    kernel.hit(0x10, rsp=0x1000, rdi=3)
    closed(engine, 1)
    assert sink.values == [(1, GID, 77, UID)]


def test_plan_is_swapped_amid_hits(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel))
    traffic = Traffic(kernel, (A, 10))
    engine.arm(2, target(kernel))
    closed(engine, 2)
    traffic.fire()
    assert traffic.fired >= 5
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert sink.losses == other.losses == {}


def test_hits_of_the_excluded_are_as_if_they_had_never_been(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    engine.arm(1, target(kernel, exclude_pids=frozenset({7})))
    for pid in (7, 8, 7):
        kernel.hit(A.site_offset, pid=pid)
    closed(engine, 1)
    assert (sink.pids, sink.filtered_count, sink.losses) == ([8], 0, {})


def test_hits_of_those_that_are_excluded_later_count_as_filtered(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    engine.arm(1, target(kernel, exclude_later=frozenset({7})))
    for pid in (7, 8, 7):
        kernel.hit(A.site_offset, pid=pid)
    closed(engine, 1)
    assert (sink.pids, sink.filtered_count, sink.losses) == ([8], 2, {})


def test_predicate_may_read_what_is_not_taken(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    both = site("a", 0x10, [argument(Register("rdi")), argument(Register("rsi"))])
    found = sample_object(both)
    wanted = taking(kernel, both, Capture(0), of=found)
    engine.arm(1, predicated(wanted, where("arg1 > 5")))
    engine.arm(2, wanted)
    for number in range(10):
        kernel.hit(0x10, rdi=number, rsi=number)
    closed(engine, 1)
    closed(engine, 2)
    assert sink.values == [(1, number) for number in range(6, 10)]
    assert (sink.filtered_count, other.filtered_count) == (6, 0)
    assert other.values == [(1, number) for number in range(10)]
