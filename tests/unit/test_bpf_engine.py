"""Engine, tables and reader together, over a kernel in memory that runs the program at each hit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.engine import Target
from stapsdtd.model import Capture, FileOffset, Memory, ReadOnlySegment, Register, Site, Vaddr
from stapsdtd.runtime.mailbox import ThreadEndedError
from tests.support import wait_for
from tests.unit.bpf_rig import FOUND, A, B, C, closed, made_engine, opened, rejecting, taking, target
from tests.unit.fake_bpf import (
    LOAD_ADDRESS,
    PATIENCE_SECONDS,
    FakeKernel,
    RecordingSink,
    descriptors_of,
    lasting_descriptors,
    running,
)
from tests.unit.samples import argument, sample_object, site

pytestmark = pytest.mark.timeout(60)


def test_page_that_was_not_there_is_brought_in_for_the_next_hit(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink
) -> None:
    where = site("a", 0x10, [argument(Register("rdi")), argument(Memory("rsi", 8), 4, signed=True)])
    found = sample_object(where)
    kernel.on_disk |= {0x5000: b"a text\0", 0x6008: (-2).to_bytes(4, "little", signed=True)}
    engine.arm(1, taking(kernel, where, Capture(0, is_string=True, max_bytes=16), Capture(1), of=found))
    kernel.hit(0x10, rdi=0x5000, rsi=0x6000)
    wait_for(lambda: len(kernel.touched) == 2, "the pages")
    assert sorted(kernel.touched) == [(10, 0x5000, 18), (10, 0x6008, 4)]
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
    assert not running("stapsdtd-reader")


def test_shutdown_goes_on_where_a_removal_fails_unexpectedly(kernel: FakeKernel) -> None:
    engine = made_engine(kernel)
    for subscription_key, each in enumerate((A, B, C)):
        opened(engine, subscription_key)
        engine.arm(subscription_key, target(kernel, each))
    kernel.fail = lambda step: ZeroDivisionError() if step == "remove g1" else None
    engine.shutdown()
    assert list(kernel.events) == ["g1"]
    assert kernel.loaded.is_closed
    assert not running("stapsdtd-reader")


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
        problem = engine.problem() or ""
        assert problem.startswith(
            f"write to {tmp_path}/uprobe_events: No such file or directory; it is not there: mount"
        )
        (tmp_path / "uprobe_events").write_text("kept")
        assert engine.problem() is None
        assert (tmp_path / "uprobe_events").read_text() == "kept"
    finally:
        engine.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_reader_that_ended_is_a_problem_and_holds_up_nobody(kernel: FakeKernel, tmp_path: Path) -> None:
    (tmp_path / "uprobe_events").touch()
    before = lasting_descriptors()
    engine = made_engine(kernel, str(tmp_path))
    opened(engine, 1)
    engine.arm(1, target(kernel, A))
    engine.ask().result(20)

    def fails(_waits: bool) -> None:
        raise ZeroDivisionError

    kernel.loaded.before_reader_waits = fails
    why = wait_for(engine.problem, "the problem")
    assert why == "the thread that reads events ended; restart the daemon"
    with pytest.raises(ThreadEndedError):
        engine.ask().result()
    with pytest.raises(ThreadEndedError):
        engine.arm(1, target(kernel, B))
    # nothing can be delivered any more, and nobody waits for it
    closed(engine, 1)
    engine.shutdown()
    assert (kernel.events, kernel.loaded.is_closed) == ({}, True)
    assert lasting_descriptors() == before


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
