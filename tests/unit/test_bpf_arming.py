"""What is armed, and what it was before, where a step of arming fails."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.engine import Target
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.model import Capture, Constant
from tests.unit.bpf_rig import (
    FOUND,
    A,
    B,
    Traffic,
    closed,
    free,
    nothing_is_left,
    opened,
    pool,
    quiesced,
    refused,
    rejecting,
    take_all,
    taking,
    target,
    wide,
)
from tests.unit.fake_bpf import FakeKernel, RecordingSink, offset_of
from tests.unit.samples import argument, captured, sample_object, site, wanted_site

pytestmark = pytest.mark.timeout(60)


def test_sites_that_the_kernel_refuses_are_found_among_many(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    before = free(kernel, engine)
    found = sample_object(*(site(f"n{number}", 16 * number, [argument(Constant(number))]) for number in range(50)))
    bad = {16 * number for number in (3, 17, 18, 49)}
    reject = rejecting("define")
    kernel.fail = lambda step: reject(step) if "define" in step and offset_of(step) in bad else None
    refusals = engine.arm(1, target(kernel, of=found))
    assert sorted(refused(refusals)) == ["n17", "n18", "n3", "n49"]
    assert all(
        "the kernel refused 'define g" in reason and "as told" in reason for reason in refused(refusals).values()
    )
    armed = [offset for event in kernel.events.values() for _, offset in event.places]
    assert sorted(armed) == [16 * number for number in range(50) if 16 * number not in bad]
    assert all(event.scopes == {None} for event in kernel.events.values())
    for each in found.parsed.sites:
        kernel.hit(each.site_offset)
    closed(engine, 1)
    assert sink.values == [(number + 1, number) for number in range(50) if 16 * number not in bad]
    nothing_is_left(engine, kernel, before)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("define", TracefsRejectedError("uprobe_events", "p:x", errno.EINVAL, "Bad")),
        ("arm", OSError(errno.EMFILE, "Too many open files")),
        ("arm g0 8", PermissionError(errno.EPERM, "perf_event_open: no")),
    ],
)
def test_refusal_of_an_event_leaves_nothing(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, step: str, error: Exception
) -> None:
    before = free(kernel, engine)
    kernel.fail = lambda found: error if found.startswith(step) else None
    assert refused(engine.arm(1, target(kernel, A, pids={7, 8}))) == {"a": str(error)}
    nothing_is_left(engine, kernel, before)
    kernel.fail = lambda _step: None
    assert engine.arm(1, target(kernel, A, pids={7, 8})) == []
    kernel.hit(A.site_offset, pid=8)
    closed(engine, 1)
    assert sink.pids == [8]


def test_refusal_of_all_processes_leaves_some_armed(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    kernel.fail = lambda step: OSError(errno.EPERM, "not all") if step.endswith("None") else None
    traffic = Traffic(kernel, (A, 7))
    assert refused(engine.arm(2, target(kernel, A))) == {"a": "[Errno 1] not all"}
    assert kernel.scopes == {"g0": {7}}
    closed(engine, 2)
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert (other.values, other.losses, sink.losses) == ([], {}, {})


def test_site_that_cannot_be_moved_stays_armed_as_it_was(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, caplog: pytest.LogCaptureFixture
) -> None:
    wants = (wanted_site(captured(A), 1, frozenset({7})), wanted_site(captured(B), 2, frozenset({8})))
    engine.arm(2, target(kernel, A, B))
    engine.arm(1, Target(FOUND, kernel.path, wants))
    kernel.fail = lambda step: OSError(errno.EMFILE, "too many") if step.endswith(" 8") else None
    closed(engine, 2)
    assert "b stays armed as it was: [Errno 24] too many" in caplog.text
    kernel.hit(A.site_offset, pid=7, rdi=1)
    kernel.hit(B.site_offset, pid=8, rsi=2)
    # the event for all processes is B's alone now
    kernel.steps()
    late = opened(engine, 3)
    assert engine.arm(3, target(kernel, B)) == []
    assert kernel.steps() == []
    closed(engine, 1)
    assert (sink.values, late.values, sink.losses) == ([(1, 1), (2, 2)], [], {})
    assert other.losses == {}


def test_processes_are_as_they_were_when_a_newcomer_is_refused(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    both = wide(1, 40)
    found = sample_object(both)
    first, second = (tuple(Capture(index) for index in range(begin, begin + 20)) for begin in (0, 20))
    engine.arm(1, Target(found, kernel.path, (wanted_site(captured(both, *first), 1, frozenset({7})),)))
    assert list(refused(engine.arm(2, taking(kernel, both, *second, of=found)))) == ["a"]
    assert list(kernel.scopes.values()) == [{7}]
    for pid in (7, 8):
        kernel.hit(0x10, pid=pid, rdi=5)
    closed(engine, 1)
    assert (sink.values, sink.filtered_count, other.rows) == ([(1, *[5] * 20)], 0, [])


def test_neighbour_that_cannot_be_moved_is_no_refusal_of_the_newcomers_site(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, B, pids={7}))
    kernel.fail = lambda step: OSError(errno.EMFILE, "many") if step == "arm g2 7" else None
    assert engine.arm(2, target(kernel, A)) == []
    for each in (A, B):
        kernel.hit(each.site_offset, pid=7)
    kernel.hit(A.site_offset, pid=8)
    quiesced(engine)
    assert ([row[5] for row in sink.rows], [row[5] for row in other.rows]) == ([1, 2], [1, 1])


def test_refused_newcomer_of_all_processes_costs_the_others_no_hit(
    kernel: FakeKernel,
    engine: BpfEngine,
    sink: RecordingSink,
    other: RecordingSink,
) -> None:
    both = wide(1, 40)
    found = sample_object(both)
    low, high = (captured(both, *map(Capture, range(begin, begin + 20))) for begin in (0, 20))
    engine.arm(1, Target(found, kernel.path, (wanted_site(low, 1, frozenset({7})),)))
    kernel.steps()
    traffic = Traffic(kernel, (both, 7))
    assert list(refused(engine.arm(2, Target(found, kernel.path, (wanted_site(high, 1),))))) == [both.name]
    assert kernel.steps() == []
    traffic.fire()
    quiesced(engine)
    assert [values[1] for values in sink.values] == list(range(traffic.fired))
    assert other.rows == []


def test_site_moves_though_there_is_no_room_for_a_new_plan(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    engine.arm(2, target(kernel, A))
    take_all(pool(kernel, "plans"))
    closed(engine, 2)
    assert list(kernel.scopes.values()) == [{7}]
    kernel.hit(A.site_offset, pid=7, rdi=5)
    quiesced(engine)
    assert (sink.values, other.values) == ([(1, 5)], [])


def test_closed_subscription_is_told_nothing_though_its_site_could_not_be_narrowed(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(2, target(kernel, A, B))
    engine.arm(1, target(kernel, A, pids={7}))
    kernel.fail = lambda step: OSError(errno.EMFILE, "many") if step.startswith("arm") else None
    closed(engine, 2)
    for pid in (7, 8):
        kernel.hit(A.site_offset, pid=pid)
    quiesced(engine)
    assert (sink.pids, other.rows) == ([7], [])


def test_nothing_is_left_of_an_arming_that_fails_as_nobody_expected(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    kernel.fail = lambda step: RuntimeError("a defect") if step.startswith("arm") else None
    with pytest.raises(RuntimeError, match="a defect"):
        engine.arm(2, target(kernel, A))
    kernel.fail = lambda _step: None
    assert kernel.events == {}
    engine.arm(1, target(kernel, A))
    kernel.hit(A.site_offset, rdi=5)
    quiesced(engine)
    assert (sink.values, other.told) == ([(1, 5)], (0, 0, 0, {}))


def test_further_process_that_cannot_be_armed_is_a_refusal_of_this_site_alone(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    kernel.fail = lambda step: OSError(errno.EMFILE, "many") if step in ("arm g0 8", "arm g1 8") else None
    assert list(refused(engine.arm(2, target(kernel, A, B, pids={8})))) == [A.name]
    kernel.hit(A.site_offset, pid=7)
    kernel.hit(B.site_offset, pid=8)
    quiesced(engine)
    assert (sink.pids, other.pids) == ([7], [8])


@pytest.mark.usefixtures("sink")
def test_file_that_cannot_be_opened_leaves_nothing(kernel: FakeKernel, engine: BpfEngine, tmp_path: Path) -> None:
    before = free(kernel, engine)
    with pytest.raises(FileNotFoundError):
        engine.arm(1, Target(FOUND, str(tmp_path / "gone"), target(kernel).sites))
    nothing_is_left(engine, kernel, before)
