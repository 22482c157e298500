"""Engine, tables and reader together, over a kernel in memory that runs the program at each hit."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stapsdtd.capture.bpf import layout, ring_set
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.pool import Pool
from stapsdtd.capture.bpf.reaper import Work
from stapsdtd.capture.bpf.tables import Tables
from stapsdtd.capture.bpf.turns import MAX_EPHEMERAL
from stapsdtd.capture.engine import LossStage, Refusal, Target
from stapsdtd.capture.names import Owner
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import (
    Capture,
    Constant,
    FileOffset,
    Memory,
    Object,
    ReadOnlySegment,
    Register,
    Site,
    Unavailable,
    Vaddr,
)
from stapsdtd.query.expression import Expression
from stapsdtd.query.parse import parse
from stapsdtd.runtime.mailbox import ThreadEndedError
from tests.support import wait_for
from tests.unit.fake_bpf import (
    LOAD_ADDRESS,
    PATIENCE_SECONDS,
    FakeKernel,
    RecordingSink,
    descriptors_of,
    offset_of,
    record,
)
from tests.unit.samples import argument, captured, sample_object, site, wanted_site

pytestmark = pytest.mark.timeout(60)

OWNER = Owner(1, 2, 3)
A, B, C = (
    site("a", 0x10, [argument(Register("rdi"))]),
    site("b", 0x1020, [argument(Register("rsi"))]),
    site("c", 0x2030),
)
FOUND = sample_object(A, B, C)
TABLES = {
    "slots": "sites", "index": "groups", "plans": "plans", "operands": "operands", "tests": "tests",
    "counters": "counters",
}  # fmt: skip
"""Pools of Tables, and what a refusal calls them."""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[FakeKernel]:
    binary = tmp_path / "app"
    binary.touch()
    with FakeKernel(str(binary)).in_place() as made:
        yield made


def made_engine(kernel: FakeKernel, tracefs: str = "/nowhere", *, max_buffer_bytes: int = 1 << 40) -> BpfEngine:
    return BpfEngine(
        Tracefs(tracefs), OWNER, kernel.loaded, kernel.paging, max_buffer_bytes, make_event=kernel.make_event
    )


@pytest.fixture
def engine(kernel: FakeKernel) -> Iterator[BpfEngine]:
    made = made_engine(kernel)
    yield made
    kernel.fail = lambda _step: None
    kernel.before_step = lambda: None
    made.shutdown()
    assert (kernel.events, descriptors_of(kernel.path)) == ({}, 0)
    assert kernel.loaded.is_closed
    assert not made._reader._thread.is_alive()


@pytest.fixture
def sink(engine: BpfEngine) -> RecordingSink:
    return opened(engine, 1)


@pytest.fixture
def other(engine: BpfEngine) -> RecordingSink:
    return opened(engine, 2)


def opened(engine: BpfEngine, subscription_key: int, kib: int = 64) -> RecordingSink:
    made = RecordingSink()
    engine.open(subscription_key, made, kib)
    return made


def closed(engine: BpfEngine, subscription_key: int) -> None:
    """Close a subscription, and wait until its sink has everything."""
    engine.close(subscription_key).result(PATIENCE_SECONDS)


def target(kernel: FakeKernel, *sites: Site, pids: set[int] | None = None, of: Object = FOUND, **more: Any) -> Target:
    """All of the object's sites where none are given; their site_ids are their places in the object, from 1 on."""
    wanted = tuple(
        wanted_site(captured(each), of.parsed.sites.index(each) + 1, None if pids is None else frozenset(pids))
        for each in sites or of.parsed.sites
    )
    return Target(of, kernel.path, wanted, **more)


def taking(kernel: FakeKernel, where: Site, *captures: Capture, of: Object) -> Target:
    return Target(of, kernel.path, (wanted_site(captured(where, *captures), 1),))


def where(text: str) -> Expression:
    return parse(text, lambda _: None)


def refused(refusals: Sequence[Refusal]) -> dict[str, str]:
    return {refusal.site.name: refusal.reason for refusal in refusals}


def free(engine: BpfEngine) -> dict[str, list[tuple[int, int]]]:
    """What each pool has to allocate, once all is over that ended until now."""
    engine._reaper.collect()
    engine._endings.begin([]).result(PATIENCE_SECONDS)
    engine._reconcile([], "")
    return {name: deepcopy(pool(engine, name)._free) for name in TABLES}


def pool(engine: BpfEngine, name: str) -> Pool:
    found = getattr(engine._tables, f"_free_{name}")
    return found if isinstance(found, Pool) else found._pool


def nothing_is_left(engine: BpfEngine, kernel: FakeKernel, before: dict[str, list[tuple[int, int]]]) -> None:
    assert free(engine) == before
    assert not np.frombuffer(kernel.loaded.table(".bss.slots"), "u8").any()
    assert not np.frombuffer(kernel.loaded.table(".bss.index"), "u4").any()
    assert (engine._reader._plans, engine._reader._counters._by_cell, engine._objects) == ({}, {}, {})
    assert (kernel.events, descriptors_of(kernel.path)) == ({}, 0)


def rejecting(text: str) -> Callable[[str], Exception | None]:
    """Refuse each step that has a text in it."""
    return lambda step: TracefsRejectedError("uprobe_events", step, errno.EINVAL, "as told") if text in step else None


def quiesced(engine: BpfEngine) -> None:
    """Wait until what was written is delivered."""
    wait_for(lambda: not any(ring.filled for ring in engine._reader._rings), "the rings to be empty")
    engine._reader._jobs.call(lambda: None)


class Traffic:
    """Hits a site before each step of the kernel's and each change of a slot; fired counts the hits."""

    def __init__(self, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, *hits: tuple[Site, int]) -> None:
        self.fired = 0
        self._kernel = kernel
        self._hits = hits
        set_slot = Tables.set_slot

        def set_slot_amid_hits(changed: Tables, slot: int, group: int, plan: int) -> None:
            self.fire()
            set_slot(changed, slot, group, plan)
            self.fire()

        kernel.before_step = kernel.after_arming = self.fire
        monkeypatch.setattr(Tables, "set_slot", set_slot_amid_hits)

    def fire(self) -> None:
        for each, pid in self._hits:
            self._kernel.hit(each.site_offset, pid=pid, rdi=self.fired, rsi=self.fired)
        self.fired += 1


# what is armed


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


# several subscriptions


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
    assert sink.values == [(1, 9, b"a long", -2)]
    assert other.values == [(1, b"a long string", 0x5000, None, None, None)]


def test_plan_is_swapped_amid_hits(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.arm(1, target(kernel))
    traffic = Traffic(kernel, monkeypatch, (A, 10))
    engine.arm(2, target(kernel))
    closed(engine, 2)
    traffic.fire()
    assert traffic.fired >= 5
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert sink.losses == other.losses == {}


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
    before = free(engine)
    engine.arm(1, target(kernel))
    engine.arm(2, target(kernel, A))
    assert descriptors_of(kernel.path) == 1
    closed(engine, 1)
    assert descriptors_of(kernel.path) == 1
    closed(engine, 2)
    nothing_is_left(engine, kernel, before)
    assert sink.values == other.values == []


def test_sites_that_only_one_wants_are_disarmed_with_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.arm(1, target(kernel, A))
    engine.arm(2, target(kernel))
    traffic = Traffic(kernel, monkeypatch, (A, 10))
    kernel.steps()
    closed(engine, 2)
    (event,) = kernel.events.values()
    assert [offset for _, offset in event.places] == [A.site_offset]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert other.losses == {}


def test_disarmed_object_may_come_back(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    before = free(engine)
    engine.arm(1, target(kernel))
    engine.disarm(1, FOUND)
    nothing_is_left(engine, kernel, before)
    engine.disarm(1, FOUND)
    engine.disarm(1, sample_object(inode=77))
    assert engine.arm(1, target(kernel)) == []
    kernel.hit(A.site_offset, rdi=1)
    closed(engine, 1)
    assert sink.values == [(1, 1)]


# scopes


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
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.arm(1, target(kernel, A, B, pids={7}))
    kernel.steps()
    traffic = Traffic(kernel, monkeypatch, (A, 7), (A, 8))
    assert engine.arm(2, target(kernel, A, B)) == []
    assert kernel.steps() == ["define g1 0x10", "define g1 0x1020", "arm g1 None", "remove g0"]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert set(sink.pids) == {7}
    assert other.pids[-2:] == [7, 8]
    assert sink.losses == other.losses == {}


def test_event_for_some_processes_is_armed_before_that_for_all_goes(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    engine.arm(2, target(kernel, A))
    kernel.steps()
    traffic = Traffic(kernel, monkeypatch, (A, 7))
    closed(engine, 2)
    assert kernel.steps() == ["define g2 0x10", "arm g2 7", "remove g1"]
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(1, number) for number in range(traffic.fired)]
    assert sink.losses == other.losses == {}


def test_all_processes_of_one_site_leave_the_others_as_they_were(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.arm(1, target(kernel, A, B, pids={7}))
    traffic = Traffic(kernel, monkeypatch, (B, 7), (B, 8))
    engine.arm(2, target(kernel, A))
    found = {tuple(offset for _, offset in event.places): event.scopes for event in kernel.events.values()}
    assert found == {(A.site_offset,): {None}, (B.site_offset,): {7}}
    traffic.fire()
    quiesced(engine)
    assert sink.values == [(2, number) for number in range(traffic.fired)]
    assert other.values == []


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
    engine.arm(1, Target(found, kernel.path, wanted.sites, where("arg1 > 5")))
    engine.arm(2, wanted)
    for number in range(10):
        kernel.hit(0x10, rdi=number, rsi=number)
    closed(engine, 1)
    closed(engine, 2)
    assert sink.values == [(1, number) for number in range(6, 10)]
    assert (sink.filtered_count, other.filtered_count) == (6, 0)
    assert other.values == [(1, number) for number in range(10)]


# refusals


def test_sites_that_the_kernel_refuses_are_found_among_many(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    before = free(engine)
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
    before = free(engine)
    kernel.fail = lambda found: error if found.startswith(step) else None
    assert refused(engine.arm(1, target(kernel, A, pids={7, 8}))) == {"a": str(error)}
    nothing_is_left(engine, kernel, before)
    kernel.fail = lambda _step: None
    assert engine.arm(1, target(kernel, A, pids={7, 8})) == []
    kernel.hit(A.site_offset, pid=8)
    closed(engine, 1)
    assert sink.pids == [8]


def test_refusal_of_all_processes_leaves_some_armed(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    kernel.fail = lambda step: OSError(errno.EPERM, "not all") if step.endswith("None") else None
    traffic = Traffic(kernel, monkeypatch, (A, 7))
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


def wide(operand: int, count: int, name: str = "a") -> Site:
    return site(name, 0x10 * operand, [argument(Register("rdi")) for _ in range(count)])


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = wide(1, 40)
    found = sample_object(both)
    low, high = (captured(both, *map(Capture, range(begin, begin + 20))) for begin in (0, 20))
    engine.arm(1, Target(found, kernel.path, (wanted_site(low, 1, frozenset({7})),)))
    kernel.steps()
    traffic = Traffic(kernel, monkeypatch, (both, 7))
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
    pool(engine, "plans")._free = []
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


def test_ring_that_could_not_be_put_in_place_is_made_anew(
    kernel: FakeKernel, engine: BpfEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(_class: int, _ring: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.loaded, "put_ring", refusing)
        sink = opened(engine, 1)
        assert "no memory" in refused(engine.arm(1, target(kernel, A)))[A.name]
    assert engine.arm(1, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=5)
    closed(engine, 1)
    assert (sink.values, sink.losses) == ([(1, 5)], {})


def test_ring_is_read_as_soon_as_hits_write_to_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes a while to return from putting one in place, and a plan may end meanwhile."""
    engine.arm(1, target(kernel, A))
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    ended = engine.close(1)
    put_ring = kernel.loaded.put_ring

    def put_amid_hits(record_class: int, ring: int) -> None:
        put_ring(record_class, ring)
        goes_on()
        ended.result(PATIENCE_SECONDS)

    monkeypatch.setattr(kernel.loaded, "put_ring", put_amid_hits)
    opened(engine, 2, 1024)
    assert (sink.values, sink.told) == ([(1, 5)], (1, 1, 0, {}))


def test_large_rings_go_with_the_last_subscription(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_set, "_KEPT_BYTES", 64 * 1024)
    engine = made_engine(kernel)
    for kib in (4, 64, 256):
        opened(engine, kib, kib)
        engine.arm(kib, target(kernel, A))
    for kib in (4, 64, 256):
        assert kernel.loaded.rings
        closed(engine, kib)
    assert kernel.loaded.rings == {}
    assert [ring.size // 1024 // len(online_cpus()) for ring in kernel.loaded.made] == [4, 64, 256]
    wait_for(lambda: all(ring.is_closed for ring in kernel.loaded.made), "the rings to be closed")
    opened(engine, 1, 4)
    engine.arm(1, target(kernel, A))
    closed(engine, 1)
    assert [ring.is_closed for ring in kernel.loaded.made] == [True, True, True, False]
    engine.shutdown()
    assert kernel.loaded.made[-1].is_closed


def test_more_values_than_a_record_holds_are_refused(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    before = free(engine)
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
    before = free(engine)
    both = wide(1, 16)
    found = sample_object(both)
    strings = [Capture(index, is_string=True) for index in range(16)]
    most, possible = layout.RECORD.itemsize + 16 * 8 + 16 * 4096, 65536 - 8 - 4096 - 1
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
    before = free(engine)
    reason = "the bpf engine cannot run that many tests at a site; distinct filters: 1"
    many = frozenset(range(1000, 1000 + layout.MAX_STEPS + 1))
    assert refused(engine.arm(1, target(kernel, A, exclude_pids=many))) == {"a": reason}
    nothing_is_left(engine, kernel, before)
    assert sink.rows == []


@pytest.mark.parametrize("name", TABLES)
def test_full_table_is_a_refusal_that_leaves_nothing(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, name: str
) -> None:
    found = pool(engine, name)
    everything, found._free = found._free, []
    before = free(engine)
    wanted = target(kernel, A, B, pids={10})
    reason = f"the bpf engine's table of {TABLES[name]} is full"
    assert refused(engine.arm(1, wanted)) == {"a": reason, "b": reason}
    nothing_is_left(engine, kernel, before)
    found._free = everything
    assert engine.arm(1, wanted) == []
    kernel.hit(B.site_offset, rsi=4)
    closed(engine, 1)
    assert sink.values == [(2, 4)]


@pytest.mark.usefixtures("sink")
def test_as_many_sites_are_armed_as_there_is_room_for(kernel: FakeKernel, engine: BpfEngine) -> None:
    pool(engine, "slots")._free = [(1, 2)]
    refusals = engine.arm(1, target(kernel))
    assert refused(refusals) == {"c": "the bpf engine's table of sites is full"}
    assert kernel.steps() == ["define g0 0x10", "define g0 0x1020", "arm g0 None"]


@pytest.mark.parametrize("name", ["plans", "counters", "tests"])
def test_full_table_costs_the_newcomer_alone(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink, name: str
) -> None:
    engine.arm(1, target(kernel, A, pids={7}))
    found = pool(engine, name)
    everything, found._free = found._free, []
    assert list(refused(engine.arm(2, target(kernel, A, pids={7}, predicate=where("arg0 == 1"))))) == ["a"]
    kernel.hit(A.site_offset, pid=7, rdi=1)
    found._free += everything
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
    before = free(engine)
    found = sample_object(site("a", 0x10, [argument(Register("xmm0"))]))
    refusals = engine.arm(1, target(kernel, of=found, predicate=where("arg0 == 1")))
    assert refused(refusals) == {"a": "%xmm0 is no register of x86-64 that the kernel saves at a probe"}
    nothing_is_left(engine, kernel, before)
    assert sink.rows == []


def test_ring_that_cannot_be_made_is_a_refusal(kernel: FakeKernel, engine: BpfEngine) -> None:
    kernel.loaded.refuse_rings = OSError(errno.ENOMEM, "Cannot allocate memory")
    opened(engine, 1)
    before = free(engine)
    assert refused(engine.arm(1, target(kernel, A))) == {"a": "[Errno 12] Cannot allocate memory"}
    nothing_is_left(engine, kernel, before)
    kernel.loaded.refuse_rings = None
    assert engine.arm(1, target(kernel, A)) == []


def test_ring_stays_where_there_is_no_room_for_a_larger_one(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A))
    kernel.loaded.refuse_rings = OSError(errno.ENOMEM, "Cannot allocate memory")
    other = opened(engine, 2, 1 << 12)
    assert engine.arm(2, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=5)
    quiesced(engine)
    assert (sink.values, other.values) == ([(1, 5)], [(1, 5)])
    assert len(kernel.loaded.puts) == 1
    kernel.loaded.refuse_rings = None
    opened(engine, 3)
    assert engine.arm(3, target(kernel, A)) == []
    assert len(kernel.loaded.puts) == 2


@pytest.mark.usefixtures("sink")
def test_file_that_cannot_be_opened_leaves_nothing(kernel: FakeKernel, engine: BpfEngine, tmp_path: Path) -> None:
    before = free(engine)
    with pytest.raises(FileNotFoundError):
        engine.arm(1, Target(FOUND, str(tmp_path / "gone"), target(kernel).sites))
    nothing_is_left(engine, kernel, before)


# rings and figures


def test_rings_are_as_large_as_the_largest_that_was_asked_for(kernel: FakeKernel, engine: BpfEngine) -> None:
    cpus = len(online_cpus())
    each_kib = 16 // cpus if cpus <= 16 else 1
    least = max(each_kib * cpus * 1024, 4096)
    opened(engine, 1, each_kib)
    engine.arm(1, target(kernel, A))
    opened(engine, 2, each_kib)
    engine.arm(2, target(kernel, A, pids={7}))
    assert kernel.loaded.puts == [(0, 1 << (least - 1).bit_length())]
    opened(engine, 3, 4 * each_kib)
    engine.arm(3, target(kernel, A))
    assert kernel.loaded.puts[1:] == [(0, 4 * kernel.loaded.puts[0][1])]


def test_rings_stay_within_what_all_may_take(kernel: FakeKernel) -> None:
    engine = made_engine(kernel, max_buffer_bytes=1 << 20)
    opened(engine, 1, 1 << 16)
    engine.arm(1, target(kernel, A))
    assert kernel.loaded.puts == [(0, 1 << 17)]
    engine.shutdown()


def test_part_of_a_site_is_kept_for_who_may_trace_everybody(kernel: FakeKernel, engine: BpfEngine) -> None:
    for number in range(64):
        opened(engine, number, 1)
        wanted = replace(target(kernel, A, predicate=where(f"arg0 == {number}")), owners=frozenset({1000}))
        reasons = refused(engine.arm(number, wanted))
        assert ("may not trace everybody's" in reasons.get("a", "")) == (number >= 48), number
    for number in range(100, 116):
        opened(engine, number, 1)
        assert engine.arm(number, target(kernel, A, predicate=where(f"arg0 == {number}"))) == []


@pytest.mark.usefixtures("sink")
def test_objects_that_come_and_go_wait_for_the_kernel(kernel: FakeKernel, engine: BpfEngine) -> None:
    hers = replace(target(kernel, A), is_ephemeral=True, owner="objects of uid 1000")
    for _ in range(MAX_EPHEMERAL):
        engine._reaper._turns.put(hers.owner, Work(lambda: None), is_awaited=False)
    reason = "objects of uid 1000 come and go faster than the kernel removes events: 256 wait"
    assert refused(engine.arm(1, hers)) == {"a": reason}
    assert kernel.events == {}
    # what stays is armed all the same, and what is another's
    for other in (replace(hers, owner="objects of uid 1001"), target(kernel, A)):
        assert engine.arm(1, other) == []
        engine.disarm(1, other.object)


@pytest.mark.usefixtures("sink")
def test_rings_are_made_for_the_sizes_that_a_record_may_have(kernel: FakeKernel, engine: BpfEngine) -> None:
    both = wide(1, 8)
    found = sample_object(both)
    engine.arm(1, taking(kernel, both, *(Capture(index) for index in range(5)), of=found))
    # that of class 0 is there from the first subscription on
    assert [number for number, _ in kernel.loaded.puts] == [0, 1]
    engine.disarm(1, found)
    engine.arm(1, taking(kernel, both, Capture(0, is_string=True, max_bytes=300), of=found))
    assert sorted(number for number, _ in kernel.loaded.puts) == [0, 1, 2, 3, 4]
    assert all(size >= 4 * layout.STRIDES[number] for number, size in kernel.loaded.puts)


def test_hits_that_a_full_ring_did_not_take_are_lost(kernel: FakeKernel, engine: BpfEngine) -> None:
    sink = opened(engine, 1, 1)
    engine.arm(1, target(kernel, A))
    (ring,) = kernel.loaded.made
    fired = 2 * ring.size // ring.stride

    def hit() -> None:
        for number in range(fired):
            kernel.hit(A.site_offset, rdi=number, cpu=number % 2)

    # while it is busy with this, nothing is read
    engine._reader._jobs.call(hit)
    closed(engine, 1)
    assert sink.values == [(1, number) for number in range(ring.size // ring.stride)]
    assert sink.losses == {LossStage.KERNEL_BUFFER: fired - len(sink.values)}


def test_who_writes_little_is_not_lost_to_who_fills_the_ring(kernel: FakeKernel, engine: BpfEngine) -> None:
    kernel.loaded.share = 5
    sink = opened(engine, 1, 1)
    engine.arm(1, target(kernel, A))
    (ring,) = kernel.loaded.made
    room = ring.size // ring.stride

    def hit() -> None:
        for number in range(2 * room):
            kernel.hit(A.site_offset, rdi=number, pid=7)
        for number in range(3):
            kernel.hit(A.site_offset, rdi=100_000 + number, pid=8)

    engine._reader._jobs.call(hit)
    closed(engine, 1)
    assert [value for _, value in sink.values] == [*range(room + 5), *range(100_000, 100_003)]
    assert sink.losses == {LossStage.KERNEL_BUFFER: room - 5}


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


# ends


def test_cycles_leave_all_tables_as_they_were(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    before = free(engine)
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


def slots(kernel: FakeKernel) -> list[int]:
    """The generations of the plans that sites have now."""
    slots = np.frombuffer(kernel.loaded.table(".bss.slots"), layout.SLOT)
    plans = np.frombuffer(kernel.loaded.table(".bss.plans"), layout.PLAN)
    return [int(plans[number]["generation"]) for number in slots["plan"] if number]


def plan_ids(kernel: FakeKernel) -> list[int]:
    return [generation % (1 << layout.PLAN_BITS) for generation in slots(kernel)]


def collected(engine: BpfEngine) -> None:
    """Allocate again what may be, as with anything that is armed or disarmed."""
    engine._reconcile([], "")


def test_plan_is_lent_again_only_when_no_hit_can_be_using_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    """However long the kernel holds up a hit that began under it."""

    def armed_plan() -> int:
        assert engine.arm(1, target(kernel, A)) == []
        (plan,) = plan_ids(kernel)
        return plan

    assert armed_plan() == 1
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    engine.disarm(1, FOUND)
    over = engine._endings.begin([])
    for number in (2, 3, 4):
        collected(engine)
        assert armed_plan() == number
        engine.disarm(1, FOUND)
    assert not over.done()
    goes_on()
    engine._endings.begin([]).result(PATIENCE_SECONDS)
    collected(engine)
    assert armed_plan() == 1
    closed(engine, 1)
    assert (sink.values, sink.told) == ([(1, 5)], (1, 1, 0, {}))


def test_plan_is_lent_again_only_when_its_last_records_are_read(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, other: RecordingSink
) -> None:
    engine.arm(1, target(kernel, A))
    engine.arm(2, target(kernel, B))
    # a record that another site's hit is still writing, in front of it in the ring
    ring = kernel.loaded.rings[0]
    (generation,) = (plan.entry.generation for plan in engine._reader._plans.values() if plan.readings[0].site_id == 2)
    complete = ring.put_busy(record(ring.stride, generation, 7, time_ns=time.monotonic_ns()))
    kernel.hit(A.site_offset, rdi=5)
    (plan,) = {number for number in plan_ids(kernel) if number != generation % (1 << layout.PLAN_BITS)}
    engine.disarm(1, FOUND)
    over = engine._endings.begin([])
    wait_for(lambda: engine._reader._endings, "the ending to be all but over")
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


def test_page_that_was_not_there_is_brought_in_for_the_next_hit(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    where = site("a", 0x10, [argument(Register("rdi")), argument(Memory("rsi", 8), 4, signed=True)])
    found = sample_object(where)
    kernel.on_disk |= {0x5000: b"a text\0", 0x6008: (-2).to_bytes(4, "little", signed=True)}
    engine.arm(1, taking(kernel, where, Capture(0, is_string=True, max_bytes=16), Capture(1), of=found))
    kernel.hit(0x10, rdi=0x5000, rsi=0x6000)
    wait_for(lambda: len(kernel.touched) == 2, "the pages")
    assert sorted(kernel.touched) == [(10, 0x5000, 17), (10, 0x6008, 4)]
    kernel.hit(0x10, rdi=0x5000, rsi=0x6000)
    closed(engine, 1)
    assert sink.values == [(1, None, None), (1, b"a text", -2)]
    unread = engine.metrics().unread
    assert (unread.from_file, unread.unavailable, unread.pages_refused, unread.stuck) == (0, 2, 0, 0)
    wait_for(lambda: engine.metrics().unread.pages_touched == 2, "the figures")


def test_constants_come_from_the_file_from_the_first_hit_on(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    content = bytearray(0x3000)
    content[0x2100:0x2108] = b"a text\0\0"
    content[0x2200:0x2204] = (-2).to_bytes(4, "little", signed=True)
    Path(kernel.path).write_bytes(content)
    where = site("a", 0x10, [argument(Register("rdi")), argument(Memory("rsi"), 4, signed=True)])
    # in memory the two segments are farther apart than in the file
    segments = (
        ReadOnlySegment(Vaddr(0), FileOffset(0), 0x1000),
        ReadOnlySegment(Vaddr(0x9000), FileOffset(0x2000), 0x1000),
    )
    found = sample_object(where)
    found = replace(found, parsed=replace(found.parsed, read_only=segments))
    engine.arm(1, taking(kernel, where, Capture(0, is_string=True, max_bytes=16), Capture(1), of=found))
    kernel.hit(0x10, rdi=LOAD_ADDRESS + 0x9100, rsi=LOAD_ADDRESS + 0x9200)
    # what is not the file's stays unavailable
    kernel.hit(0x10, rdi=LOAD_ADDRESS + 0xA000, rsi=LOAD_ADDRESS + 0x8FFF)
    ended = engine.close(1)
    ended.result(PATIENCE_SECONDS)
    assert sink.values == [(1, b"a text", -2), (1, None, None)]
    unread = engine.metrics().unread
    assert (unread.from_file, unread.unavailable) == (2, 2)


def test_event_that_cannot_be_removed_harms_no_other(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, caplog: pytest.LogCaptureFixture
) -> None:
    before = free(engine)
    engine.arm(1, target(kernel, A))
    kernel.fail = rejecting("remove")
    engine.disarm(1, FOUND)
    assert "trying again later" in caplog.text
    assert free(engine) == before
    kernel.fail = lambda _step: None
    assert engine.arm(1, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=1)
    closed(engine, 1)
    assert sink.values == [(1, 1)]
    engine.quiesced().result()
    assert list(kernel.events) == ["g0"]
    engine.retry_cleanup()
    wait_for(lambda: not kernel.events, "it to be removed")


def test_shutdown_removes_everything_though_one_removal_fails(kernel: FakeKernel) -> None:
    engine = made_engine(kernel)
    sinks = [opened(engine, subscription_key) for subscription_key in range(3)]
    for subscription_key, each in enumerate((A, B, C)):
        engine.arm(subscription_key, target(kernel, each))
        kernel.hit(each.site_offset)
    kernel.fail = rejecting("remove g1")
    engine.shutdown()
    removals = sorted(step for step in kernel.log if "remove" in step)
    assert removals == ["remove g0", "remove g1", "remove g1", "remove g2"]
    assert list(kernel.events) == ["g1"]
    assert kernel.scopes == {"g1": set()}
    assert [len(sink.rows) for sink in sinks] == [1, 1, 1]
    assert (descriptors_of(kernel.path), kernel.loaded.is_closed) == (0, True)
    assert not engine._reader._thread.is_alive()


def test_shutdown_goes_on_where_a_removal_fails_unexpectedly(kernel: FakeKernel) -> None:
    engine = made_engine(kernel)
    for subscription_key, each in enumerate((A, B, C)):
        opened(engine, subscription_key)
        engine.arm(subscription_key, target(kernel, each))
    kernel.fail = lambda step: ZeroDivisionError() if step == "remove g1" else None
    engine.shutdown()
    assert list(kernel.events) == ["g1"]
    assert kernel.loaded.is_closed
    assert not engine._reader._thread.is_alive()


def test_memory_that_cannot_be_read_is_a_missing_value(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    found = sample_object(site("a", 0x10, [argument(Memory("rbp", -8)), argument(Register("rdi"))]))
    engine.arm(1, target(kernel, of=found))
    kernel.hit(0x10, rdi=3)
    closed(engine, 1)
    assert sink.values == [(1, None, 3)]


def test_figures_count_what_subscriptions_share_once(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    assert (engine.metrics().attachments, engine.metrics().groups) == (0, 0)
    engine.arm(1, target(kernel))
    opened(engine, 2)
    engine.arm(2, target(kernel, A))
    figures = engine.metrics()
    assert (figures.attachments, figures.groups) == (len(FOUND.parsed.sites), len(kernel.events))
    assert [(ring.name, ring.filled_bytes) for ring in figures.rings] == [(str(layout.STRIDES[0]), 0)]
    assert all(ring.size_bytes >= 64 * 1024 for ring in figures.rings)
    kernel.hit(A.site_offset)
    wait_for(lambda: len(sink.rows) == 1, "the event")
    closed(engine, 1)
    assert engine.metrics().attachments == 1


def test_engine_says_why_nothing_can_be_armed(kernel: FakeKernel, tmp_path: Path) -> None:
    engine = made_engine(kernel, str(tmp_path))
    try:
        assert engine.problem() == f"{tmp_path}/uprobe_events cannot be written: No such file or directory"
        (tmp_path / "uprobe_events").write_text("kept")
        assert engine.problem() is None
        assert (tmp_path / "uprobe_events").read_text() == "kept"
    finally:
        engine.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_reader_that_ended_is_a_problem_and_holds_up_nobody(
    kernel: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uprobe_events").touch()
    engine = made_engine(kernel, str(tmp_path))
    opened(engine, 1)
    engine.arm(1, target(kernel, A))
    engine.ask().result(20)
    monkeypatch.setattr(engine._reader._poller, "wait", lambda *_: 1 // 0)
    why = wait_for(engine.problem, "the problem")
    assert why == "the thread that reads events ended; restart the daemon"
    with pytest.raises(ThreadEndedError):
        engine.ask().result()
    with pytest.raises(ThreadEndedError):
        engine.arm(1, target(kernel, B))
    # nothing can be delivered any more, and nobody waits for it
    closed(engine, 1)
    engine.shutdown()
    assert (kernel.events, kernel.loaded.is_closed, engine._reader._poller._idle.closed) == ({}, True, True)


class TestForeignHits:
    """Those of process 10, which the first subscription does not see."""

    def hers(self, kernel: FakeKernel, *sites: Site, **more: Any) -> Target:
        return replace(target(kernel, *sites, **more), owners=frozenset({1000}), exclude_pids=frozenset({10}))

    @pytest.mark.usefixtures("sink", "other")
    def test_are_counted_once_by_subscription_and_object(self, kernel: FakeKernel, engine: BpfEngine) -> None:
        engine.arm(1, self.hers(kernel, A, B))
        assert engine.foreign_hits() == {}
        for each in (A, A, B):
            kernel.hit(each.site_offset)
        assert engine.foreign_hits() == {(1, FOUND.key): 3}
        kernel.hit(A.site_offset)
        # another of the same kind makes a new plan, and both are to blame from then on
        engine.arm(2, self.hers(kernel, A))
        kernel.hit(A.site_offset)
        assert engine.foreign_hits() == {(1, FOUND.key): 2, (2, FOUND.key): 1}
        kernel.hit(B.site_offset)
        engine.close(1)
        assert engine.foreign_hits() == {(1, FOUND.key): 1}

    @pytest.mark.usefixtures("sink", "other")
    def test_are_nobodys_where_another_sees_them_all(self, kernel: FakeKernel, engine: BpfEngine) -> None:
        engine.arm(1, self.hers(kernel, A))
        engine.arm(2, target(kernel, A))
        kernel.hit(A.site_offset)
        assert engine.foreign_hits() == {}
        engine.close(2)
        kernel.hit(A.site_offset)
        assert engine.foreign_hits() == {(1, FOUND.key): 1}

    @pytest.mark.usefixtures("sink", "other")
    def test_are_of_who_wants_them_patched(self, kernel: FakeKernel, engine: BpfEngine) -> None:
        # process 10 is patched for the second one's sake
        engine.arm(1, self.hers(kernel, A, pids={11}))
        engine.arm(2, self.hers(kernel, A))
        kernel.hit(A.site_offset)
        assert engine.foreign_hits() == {(2, FOUND.key): 1}
        # and for nobody's who sees it, if only for some processes
        opened(engine, 3)
        engine.arm(3, target(kernel, A, pids={10}))
        kernel.hit(A.site_offset)
        assert engine.foreign_hits() == {(2, FOUND.key): 1}
