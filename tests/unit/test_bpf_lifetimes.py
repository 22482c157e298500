"""Hits and records that outlive what they belong to: nothing is allocated again before its last user is gone."""

from __future__ import annotations

import errno
import itertools
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.turns import MAX_EPHEMERAL
from stapsdtd.capture.engine import LossStage
from tests.support import wait_for
from tests.unit.bpf_rig import (
    FOUND,
    A,
    B,
    C,
    closed,
    free,
    nothing_is_left,
    opened,
    refused,
    rejecting,
    slots,
    target,
    where,
)
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeKernel, RecordingSink, record
from tests.unit.samples import sample_object

pytestmark = pytest.mark.timeout(60)


def plan_ids(kernel: FakeKernel) -> list[int]:
    return [generation % (1 << layout.PLAN_BITS) for generation in slots(kernel)]


def collected(engine: BpfEngine) -> None:
    """Allocate again what may be, as with anything that is armed or disarmed."""
    engine.disarm(1, sample_object(inode=77))


def ended(engine: BpfEngine) -> Future[None]:
    """Done when all is over that ended until now."""
    opened(engine, -1, 1)
    return engine.close(-1)


@pytest.mark.usefixtures("sink")
def test_objects_that_come_and_go_wait_for_the_kernel(kernel: FakeKernel, engine: BpfEngine) -> None:
    hers = replace(target(kernel, A), is_ephemeral=True, owner="objects of uid 1000")
    kernel.reaper_worker.is_held = True
    for number in range(MAX_EPHEMERAL):
        one = replace(hers, object=sample_object(A, inode=1000 + number))
        assert engine.arm(1, one) == []
        engine.disarm(1, one.object)
    waiting = list(kernel.events)
    reason = "objects of uid 1000 come and go faster than the kernel removes events: 256 wait"
    assert refused(engine.arm(1, hers)) == {"a": reason}
    assert list(kernel.events) == waiting
    # what stays is armed all the same, and what is another's
    for other in (replace(hers, owner="objects of uid 1001"), target(kernel, A)):
        assert engine.arm(1, other) == []
        engine.disarm(1, other.object)


def test_close_tells_the_rest_before_it_is_done_and_nothing_afterwards(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, predicate=where("arg0 != 3")))
    engine.arm(2, target(kernel, A))
    for number in range(10):
        kernel.hit(A.site_offset, rdi=number)
    closed(engine, 1)
    told = list(sink.values), sink.filtered_count
    assert told == ([(1, number) for number in range(10) if number != 3], 1)
    for number in range(10):
        kernel.hit(A.site_offset, rdi=number)
    closed(engine, 2)
    assert (sink.values, sink.filtered_count) == told
    assert len(other.values) == 20


def test_cycles_leave_all_tables_as_they_were(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    before = free(kernel, engine)
    scopes: list[set[int] | None] = [None, {7}, {7, 8}]
    for first, second in itertools.product(scopes, repeat=2):
        engine.arm(1, target(kernel, A, B, pids=first, predicate=where("arg0 > 1")))
        engine.arm(2, target(kernel, B, C, pids=second, exclude_pids=frozenset({9})))
        kernel.hit(B.site_offset, pid=7, rsi=5)
        engine.disarm(1, FOUND)
        engine.arm(1, target(kernel, A, pids=first))
        engine.disarm(2, FOUND)
        engine.disarm(1, FOUND)
        nothing_is_left(engine, kernel, before)
    assert len(sink.values) == len(other.values) == 9
    assert {number for number, _ in kernel.loaded.puts} == {0}
    assert len(kernel.loaded.made) == 1


def test_plan_is_lent_again_only_when_no_hit_can_be_using_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    """However long the kernel holds up a hit that began under it."""

    def armed_plan() -> int:
        assert engine.arm(1, target(kernel, A)) == []
        (plan,) = plan_ids(kernel)
        return plan

    first = armed_plan()
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    engine.disarm(1, FOUND)
    over = ended(engine)
    for number in range(first + 1, first + 4):
        collected(engine)
        assert armed_plan() == number
        engine.disarm(1, FOUND)
    assert not over.done()
    goes_on()
    ended(engine).result(PATIENCE_SECONDS)
    collected(engine)
    assert armed_plan() == first
    closed(engine, 1)
    assert (sink.values, sink.told) == ([(1, 5)], (1, 1, 0, {}))


def test_plan_is_lent_again_only_when_its_last_records_are_read(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(2, target(kernel, B))
    (generation,) = slots(kernel)
    engine.arm(1, target(kernel, A))
    # a record that another site's hit is still writing, in front of it in the ring
    ring = kernel.loaded.rings[0]
    complete = ring.put_busy(record(ring.stride, generation, 7, time_ns=time.monotonic_ns()))
    kernel.hit(A.site_offset, rdi=5)
    (plan,) = {number for number in plan_ids(kernel) if number != generation % (1 << layout.PLAN_BITS)}
    waits = kernel.loaded.waits
    engine.disarm(1, FOUND)
    wait_for(lambda: kernel.loaded.waits == waits + 1, "its grace period to begin")
    over = ended(engine)
    engine.arm(1, target(kernel, C))
    engine.disarm(1, FOUND)
    # the next one's begins when the reader was told of the first ending
    wait_for(lambda: kernel.loaded.waits == waits + 2, "the ending to be all but over")
    engine.ask().result(PATIENCE_SECONDS)
    collected(engine)
    engine.arm(1, target(kernel, C))
    assert plan not in plan_ids(kernel)
    assert (over.done(), sink.rows) == (False, [])
    complete()
    over.result(PATIENCE_SECONDS)
    collected(engine)
    assert sink.values == [(1, 5)]
    engine.disarm(1, FOUND)
    engine.arm(1, target(kernel, A))
    assert plan in plan_ids(kernel)
    closed(engine, 2)
    assert other.values == [(2, 7)]


@pytest.mark.parametrize("fate", ["delivered", "filtered", "excluded", "lost"])
def test_hit_that_takes_long_still_counts_for_its_own_subscription(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, fate: str
) -> None:
    """Its plan's room, counters and slot are somebody else's by then if they are lent too early."""
    wanted = target(
        kernel, A, predicate=where("arg0 == 1") if fate == "filtered" else None,
        exclude_pids=frozenset({7} if fate == "excluded" else ()),
    )  # fmt: skip
    engine.arm(1, wanted)
    (goes_on,) = kernel.begin_hits(A.site_offset, pid=7, rdi=5)
    ended = engine.close(1)
    for _ in range(3):
        assert engine.arm(2, target(kernel, A)) == []
        kernel.hit(A.site_offset, pid=8, rdi=6)
        engine.disarm(2, FOUND)
    # not known to anybody but the program as yet
    assert not ended.done()
    if fate == "lost":
        del kernel.loaded.rings[0]
    goes_on()
    ended.result(PATIENCE_SECONDS)
    assert sink.told == {
        "delivered": (1, 1, 0, {}), "filtered": (1, 0, 1, {}), "excluded": (0, 0, 0, {}),
        "lost": (1, 0, 0, {LossStage.KERNEL_BUFFER: 1}),
    }[fate]  # fmt: skip
    closed(engine, 2)
    assert (other.values, other.told) == ([(1, 6)] * 3, (3, 3, 0, {}))
    assert engine.metrics().strays == 0


def test_hit_whose_plan_became_another_one_is_nobodys_record(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    """Should that ever be, which it cannot by all that is known, the generation tells."""
    engine.arm(1, target(kernel, A))
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    (plan,) = plan_ids(kernel)
    np.frombuffer(kernel.loaded.table(".bss.plans"), layout.PLAN)["generation"][plan] += 1 << layout.PLAN_BITS
    goes_on()
    engine.arm(2, target(kernel, B))
    closed(engine, 1)
    assert (sink.rows, sink.told) == ([], (1, 0, 0, {LossStage.DECODE: 1}))
    assert (other.rows, engine.metrics().strays) == ([], 1)


def test_grace_period_that_fails_is_tried_again(
    kernel: FakeKernel, sink: RecordingSink, engine: BpfEngine, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.loaded.waits_refused.append(OSError(errno.ENOMEM, "Cannot allocate memory"))
    engine.arm(1, target(kernel, A))
    kernel.hit(A.site_offset, rdi=5)
    closed(engine, 1)
    assert sink.values == [(1, 5)]
    assert (
        "cannot wait until hits have left an old plan, trying again: [Errno 12] Cannot allocate memory" in caplog.text
    )


def test_closing_waits_for_nothing(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    engine.arm(1, target(kernel, A))
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    ended = engine.close(1)
    # whoever else subscribes is served meanwhile
    late = opened(engine, 3)
    assert engine.arm(3, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=6)
    wait_for(lambda: late.values == [(1, 6)], "the event")
    assert (ended.done(), sink.rows) == (False, [])
    goes_on()
    ended.result(PATIENCE_SECONDS)
    assert sink.values == [(1, 5)]


def test_what_fired_is_told_while_it_is_on_its_way(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    engine.arm(1, target(kernel, A, predicate=where("arg0 != 3")))
    ring = kernel.loaded.rings[0]
    (generation,) = slots(kernel)
    complete = ring.put_busy(record(ring.stride, generation, 9, time_ns=time.monotonic_ns(), matched=1))
    for number in range(5):
        kernel.hit(A.site_offset, rdi=number)
    wait_for(lambda: sink.fired_count, "what fired")
    assert sink.told == (5, 0, 1, {})
    complete()
    wait_for(lambda: len(sink.rows) == 5, "the events")


def test_event_that_cannot_be_removed_harms_no_other(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, caplog: pytest.LogCaptureFixture
) -> None:
    before = free(kernel, engine)
    engine.arm(1, target(kernel, A))
    kernel.fail = rejecting("remove")
    engine.disarm(1, FOUND)
    assert "trying again later" in caplog.text
    assert free(kernel, engine) == before
    kernel.fail = lambda _step: None
    assert engine.arm(1, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=1)
    closed(engine, 1)
    assert sink.values == [(1, 1)]
    engine.quiesced().result()
    assert list(kernel.events) == ["g0"]
    engine.retry_cleanup()
    wait_for(lambda: not kernel.events, "it to be removed")
