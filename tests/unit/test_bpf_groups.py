"""Which tracefs events hold which sites, and for which processes they are armed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.engine import Target
from stapsdtd.model import Constant, Register
from tests.support import wait_for
from tests.unit.bpf_rig import FOUND, A, B, C, Traffic, closed, free, nothing_is_left, opened, quiesced, refused, target
from tests.unit.fake_bpf import FakeKernel, RecordingSink, descriptors_of
from tests.unit.samples import argument, captured, sample_object, site, wanted_site

pytestmark = pytest.mark.timeout(60)


def test_sites_with_distinct_page_offsets_share_one_group(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    assert engine.arm(1, target(kernel)) == []
    assert kernel.steps() == ["define g0 0x10", "define g0 0x1020", "define g0 0x2030", "arm g0 None"]
    for each, value in ((A, 5), (B, 6), (C, 7), (A, 8)):
        kernel.hit(each.site_offset, rdi=value, rsi=value + 100)
    closed(engine, 1)
    assert sorted(sink.values) == [(1, 5), (1, 8), (2, 106), (3,)]
    assert sink.losses == {}


def test_sites_with_the_same_page_offset_have_groups_of_their_own(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    same = [site(f"n{number}", 0x1000 * number + 0x44, [argument(Register("rdi"))]) for number in range(3)]
    found = sample_object(*same, site("further", 0x45))
    assert engine.arm(1, target(kernel, of=found)) == []
    groups = sorted(sorted(offset for _, offset in event.places) for event in kernel.events.values())
    assert groups == [[0x44, 0x45], [0x1044], [0x2044]]
    for number in (2, 0, 1):
        kernel.hit(0x1000 * number + 0x44, rdi=number)
    closed(engine, 1)
    assert sink.values == [(3, 2), (1, 0), (2, 1)]


def test_many_sites_are_told_apart(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    found = sample_object(*(site(f"n{number}", 0x123 * number, [argument(Constant(number))]) for number in range(100)))
    assert engine.arm(1, target(kernel, of=found)) == []
    assert len(kernel.events) == 1
    for each in found.parsed.sites:
        kernel.hit(each.site_offset)
    closed(engine, 1)
    assert sink.values == [(number + 1, number) for number in range(100)]


@pytest.mark.usefixtures("sink")
def test_place_names_the_semaphore_and_a_descriptor_that_outlives_the_callers(
    kernel: FakeKernel, engine: BpfEngine
) -> None:
    found = sample_object(site("a", 0x10, semaphore=0x4000), site("b", 0x20))
    descriptor = os.open(kernel.path, os.O_RDONLY)
    engine.arm(1, Target(found, f"/proc/self/fd/{descriptor}", target(kernel, of=found).sites))
    os.close(descriptor)
    assert kernel.steps()[:2] == ["define g0 0x10(0x4000)", "define g0 0x20"]
    assert descriptors_of(kernel.path) == 1


def test_objects_have_groups_of_their_own(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.touch()
    second = sample_object(site("z", 0x10, [argument(Register("rdi"))]), inode=2)
    assert engine.arm(1, target(kernel)) == []
    assert engine.arm(1, Target(second, str(library), (wanted_site(captured(second.parsed.sites[0]), 9),))) == []
    kernel.hit(0x10, rdi=1)
    kernel.hit(0x10, rdi=2, path=str(library))
    engine.disarm(1, FOUND)
    kernel.hit(0x10, rdi=3)
    kernel.hit(0x10, rdi=4, path=str(library))
    wait_for(lambda: not descriptors_of(kernel.path), "its descriptor to be closed")
    assert descriptors_of(str(library)) == 1
    closed(engine, 1)
    assert sink.values == [(1, 1), (9, 2), (9, 4)]
    wait_for(lambda: not descriptors_of(str(library)), "the other's descriptor to be closed")


def test_first_hit_of_an_armed_site_finds_its_plan(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    """The kernel patches sites one by one, and they may be hit before the call returns."""
    kernel.after_arming = lambda: kernel.hit(0x10, rdi=len(kernel.log))
    engine.arm(1, target(kernel, A, pids={10, 11}))
    closed(engine, 1)
    assert sink.values == [(1, 2), (1, 3)]


def test_disarm_of_one_of_two_leaves_the_event(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel))
    engine.arm(2, target(kernel))
    kernel.steps()
    engine.disarm(2, FOUND)
    assert kernel.steps() == []
    kernel.hit(A.site_offset, rdi=1)
    closed(engine, 1)
    assert (sink.values, other.values) == ([(1, 1)], [])
    assert kernel.steps() == ["remove g0"]


def test_close_of_the_last_removes_the_event_and_closes_the_object(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    before = free(kernel, engine)
    engine.arm(1, target(kernel))
    engine.arm(2, target(kernel, A))
    assert descriptors_of(kernel.path) == 1
    closed(engine, 1)
    assert descriptors_of(kernel.path) == 1
    closed(engine, 2)
    nothing_is_left(engine, kernel, before)
    assert sink.values == other.values == []


def test_sites_that_only_one_wants_are_disarmed_with_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A))
    engine.arm(2, target(kernel))
    traffic = Traffic(kernel, (A, 10))
    kernel.steps()
    closed(engine, 2)
    (event,) = kernel.events.values()
    assert [offset for _, offset in event.places] == [A.site_offset]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert other.losses == {}


def test_disarmed_object_may_come_back(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    before = free(kernel, engine)
    engine.arm(1, target(kernel))
    engine.disarm(1, FOUND)
    nothing_is_left(engine, kernel, before)
    engine.disarm(1, FOUND)
    engine.disarm(1, sample_object(inode=77))
    assert engine.arm(1, target(kernel)) == []
    kernel.hit(A.site_offset, rdi=1)
    closed(engine, 1)
    assert sink.values == [(1, 1)]


def test_only_the_processes_that_are_wanted_are_armed(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    assert engine.arm(1, target(kernel, A, B, pids={7, 8})) == []
    assert kernel.steps() == ["define g0 0x10", "define g0 0x1020", "arm g0 7", "arm g0 8"]
    for pid in (7, 8, 9):
        kernel.hit(A.site_offset, pid=pid)
    closed(engine, 1)
    assert sink.pids == [7, 8]
    assert (sink.filtered_count, sink.losses) == (0, {})


def test_sites_that_are_wanted_of_different_processes_have_groups_of_their_own(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    scoped = [wanted_site(captured(A), 1, frozenset({7})), wanted_site(captured(B), 2), wanted_site(captured(C), 3)]
    assert engine.arm(1, Target(FOUND, kernel.path, tuple(scoped))) == []
    found = {tuple(offset for _, offset in event.places): event.scopes for event in kernel.events.values()}
    assert found == {(A.site_offset,): {7}, (B.site_offset, C.site_offset): {None}}
    assert sink.losses == {}


def test_further_process_is_armed_in_the_same_event(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, pids={7}))
    kernel.steps()
    assert engine.arm(2, target(kernel, pids={7, 8, 9})) == []
    assert kernel.steps() == ["arm g0 8", "arm g0 9"]
    for pid in (7, 8, 9, 10):
        kernel.hit(A.site_offset, pid=pid)
    closed(engine, 1)
    closed(engine, 2)
    assert (sink.pids, sink.filtered_count) == ([7], 2)
    assert (other.pids, other.filtered_count) == ([7, 8, 9], 0)


def test_process_that_only_one_wants_is_disarmed_with_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    engine.arm(2, target(kernel, A, pids={7, 8}))
    kernel.steps()
    opened(engine, 3)
    assert engine.arm(3, target(kernel, A, pids={8})) == []
    closed(engine, 3)
    assert kernel.steps() == []
    closed(engine, 2)
    assert kernel.steps() == ["define g1 0x10", "arm g1 7", "remove g0"]
    assert sink.rows == other.rows == []


def test_process_that_is_gone_is_no_reason_to_refuse(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    kernel.fail = lambda step: ProcessLookupError(errno.ESRCH, "gone") if step.endswith(" 7") else None
    assert engine.arm(1, target(kernel, pids={7, 8})) == []
    kernel.hit(A.site_offset, pid=8)
    closed(engine, 1)
    assert sink.pids == [8]


def test_event_for_all_processes_is_armed_before_that_for_some_goes(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, B, pids={7}))
    kernel.steps()
    traffic = Traffic(kernel, (A, 7), (A, 8))
    assert engine.arm(2, target(kernel, A, B)) == []
    assert kernel.steps() == ["define g1 0x10", "define g1 0x1020", "arm g1 None", "remove g0"]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert set(sink.pids) == {7}
    assert other.pids[-2:] == [7, 8]
    assert sink.losses == other.losses == {}


def test_event_for_some_processes_is_armed_before_that_for_all_goes(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    engine.arm(2, target(kernel, A))
    kernel.steps()
    traffic = Traffic(kernel, (A, 7))
    closed(engine, 2)
    assert kernel.steps() == ["define g2 0x10", "arm g2 7", "remove g1"]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert sink.losses == other.losses == {}


def test_all_processes_of_one_site_leave_the_others_as_they_were(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, B, pids={7}))
    traffic = Traffic(kernel, (B, 7), (B, 8))
    engine.arm(2, target(kernel, A))
    found = {tuple(offset for _, offset in event.places): event.scopes for event in kernel.events.values()}
    assert found == {(A.site_offset,): {None}, (B.site_offset,): {7}}
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(2, number) for number in range(traffic.fired)]
    assert other.values == []


def test_processes_are_left_alone_when_another_one_cannot_be_armed(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    kernel.fail = lambda step: OSError(errno.EMFILE, "many") if step.endswith(" 9") else None
    assert list(refused(engine.arm(2, target(kernel, A, pids={8, 9})))) == [A.name]
    assert kernel.scopes == {"g0": {7}}
    kernel.fail = lambda _step: None
    assert engine.arm(2, target(kernel, A, pids={8, 9})) == []
    for pid in (7, 8, 9):
        kernel.hit(A.site_offset, pid=pid)
    quiesced(engine)
    assert (sink.pids, other.pids) == ([7], [8, 9])


@pytest.mark.usefixtures("sink", "other")
def test_process_with_another_main_thread_is_armed_again(kernel: FakeKernel, engine: BpfEngine) -> None:
    engine.arm(1, target(kernel, A, pids={10, 11}))
    engine.arm(2, target(kernel, B))
    kernel.steps()
    engine.renew(10)
    engine.renew(12)
    assert kernel.steps() == ["renew g0 in 10"]
    closed(engine, 1)
    closed(engine, 2)
