"""Engine and reader together, over a tracefs in a folder."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stapsdtd.capture.engine import LossStage, RingMetrics, Target
from stapsdtd.capture.ftrace.decode import Decoder
from stapsdtd.capture.ftrace.engine import FtraceEngine
from stapsdtd.capture.names import Owner
from stapsdtd.errors import LimitReachedError, TracefsRejectedError
from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import I32
from stapsdtd.kernel import procfs
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.model import Capture, Object, Register, Unavailable
from stapsdtd.procs.descendants import Descendants
from stapsdtd.query.expression import Condition
from stapsdtd.query.parse import parse
from stapsdtd.runtime.mailbox import ThreadEndedError
from stapsdtd.spans.span import SpanCounts
from tests.support import descriptors, wait_for
from tests.unit.fake_tracefs import FakeTracefs
from tests.unit.ring_pages import Data, Kernel, page
from tests.unit.samples import argument, captured, event_rows, predicated, sample_object, site, wanted_site

OWNER = Owner(1, 2, 3)
FOUND = sample_object(
    site("a", 0x10, [argument(Register("rdi"))]), site("b", 0x20, [argument(Register("rsi"))]), site("c", 0x30)
)
TICKET = 1
READER = "stapsdtd-reader"


class RecordingSink:
    """before_delivery is called first, and may raise."""

    def __init__(self) -> None:
        self.before_delivery: Callable[[], None] = lambda: None
        self.batches: list[EventBatch] = []
        self.losses: list[tuple[LossStage, int]] = []
        self.filtered_count = 0

    def fired(self, count: int) -> None:
        raise AssertionError(count)

    def deliver(self, batch: EventBatch) -> None:
        self.before_delivery()
        self.batches.append(batch)

    def filtered(self, count: int, undecided: int = 0) -> None:
        del undecided
        self.filtered_count += count

    def spanned(self, counts: SpanCounts) -> None:
        del counts

    def lost(self, stage: LossStage, count: int) -> None:
        self.losses.append((stage, count))

    def values(self) -> list[tuple[object, ...]]:
        """(site, values…) of each event, in the order in which they came."""
        return [row[5:] for batch in self.batches for row in event_rows(batch)]


def pids_of(tids: I32) -> I32:
    return tids


@pytest.fixture
def tracefs(tmp_path: Path) -> FakeTracefs:
    return FakeTracefs(tmp_path)


@pytest.fixture
def engine(tracefs: FakeTracefs) -> Iterator[FtraceEngine]:
    made = FtraceEngine(tracefs, OWNER, pids_of, Descendants())
    yield made
    tracefs.refuse = lambda _path, _line: False
    made.shutdown()
    assert tracefs.instances() == []
    assert tracefs.definitions == {}


@pytest.fixture
def sink(engine: FtraceEngine) -> RecordingSink:
    made = RecordingSink()
    engine.open(TICKET, made, 64)
    return made


def target(found: Object = FOUND, predicate: Condition | None = None, **more: Any) -> Target:
    sites = tuple(wanted_site(captured(each), number) for number, each in enumerate(found.parsed.sites, 1))
    return predicated(Target(found, "/proc/self/fd/9", sites, **more), predicate)


def kernels(tracefs: FakeTracefs) -> list[Kernel]:
    """One for each event, in the order of their definition."""
    return [
        Kernel(lines[0].split(" ", 2)[2], tracefs.format_of(name).id) for name, lines in tracefs.definitions.items()
    ]


def put(tracefs: FakeTracefs, instance: str, *records: bytes, cpu: int = 0, at: int | None = None) -> None:
    tracefs.put_page(instance, cpu, page(at or time.monotonic_ns(), *(Data(1, record) for record in records)))


def test_events_reach_the_sink(tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink) -> None:
    assert engine.arm(TICKET, target()) == []
    (kernel,) = kernels(tracefs)
    (instance,) = tracefs.instances()
    put(tracefs, instance, kernel.record(0, q0=5), kernel.record(1, q0=6), kernel.record(0, q0=7), kernel.record(2))
    wait_for(lambda: len(sink.values()) == 4, "the events")
    assert sorted(sink.values(), key=str) == [(1, 5), (1, 7), (2, 6), (3,)]
    engine.close(TICKET)
    assert (tracefs.instances(), tracefs.definitions, sink.losses) == ([], {}, [])


def alive(kind: type) -> int:
    """How many objects of a class there are."""
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def where(text: str) -> Condition:
    return parse(text, lambda _: None)


def test_events_that_are_not_wanted_are_counted(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    sites = (
        wanted_site(captured(FOUND.parsed.sites[0]), 1, frozenset({7, 8})),
        wanted_site(captured(FOUND.parsed.sites[1]), 2),
    )
    assert engine.arm(TICKET, predicated(replace(target(), sites=sites), where("arg0 > 5 || tid == 7"))) == []
    (kernel,) = kernels(tracefs)
    (instance,) = tracefs.instances()
    fired = [(0, 7, 1), (0, 8, 1), (0, 8, 6), (0, 9, 6), (1, 9, 6), (1, 9, 5), (1, 7, 0)]
    put(tracefs, instance, *(kernel.record(number, tid=tid, q0=value) for number, tid, value in fired))
    wait_for(lambda: len(sink.values()) == 4, "the events")
    assert sorted(sink.values(), key=str) == [(1, 1), (1, 6), (2, 0), (2, 6)]
    assert sorted(batch.tid.tolist() for batch in sink.batches) == [[7, 8, 9, 7]]
    engine.close(TICKET)
    assert (sink.filtered_count, sink.losses) == (3, [])


def test_what_only_the_predicate_reads_is_fetched_and_not_delivered(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    arguments = [argument(Register(name), 4, signed=True) for name in ("rdi", "rsi", "rdx")]
    found = sample_object(site("a", 0x10, arguments))
    (fires,) = found.parsed.sites
    wanted = wanted_site(captured(fires, Capture(2), Capture(0)), 1)
    predicate = where("arg1 < -1 && arg2 != 3")
    assert engine.arm(TICKET, predicated(replace(target(found), sites=(wanted,)), predicate)) == []
    ((line,),) = tracefs.definitions.values()
    assert line.endswith("q0=%dx:u64 q1=%di:u64 q2=%si:u64")
    (kernel,) = kernels(tracefs)
    minus_2, minus_1 = (1 << 32) - 2, (1 << 32) - 1
    records = [(4, 10, minus_2), (4, 11, minus_1), (3, 12, minus_2), (5, 13, minus_2)]
    put(tracefs, tracefs.instances()[0], *(kernel.record(0, q0=q0, q1=q1, q2=q2) for q0, q1, q2 in records))
    wait_for(lambda: sink.values() == [(1, 4, 10), (1, 5, 13)], "the events")
    assert sink.filtered_count == 2


def test_argument_that_is_captured_as_a_string_is_fetched_as_a_number_too(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    (fires, *_) = FOUND.parsed.sites
    wanted = wanted_site(captured(fires, Capture(0, is_string=True)), 1)
    assert engine.arm(TICKET, predicated(replace(target(), sites=(wanted,)), where("arg0"))) == []
    ((line,),) = tracefs.definitions.values()
    assert "s0=+0(%di):ustring" in line
    assert "q0=%di:u64" in line
    assert sink.batches == []


def test_sites_that_cannot_be_tested_are_refused_with_the_reason(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    found = sample_object(
        site("fits", 0x10, [argument(), argument()]),
        site("lacks", 0x20, [argument()]),
        site("unreadable", 0x30, [argument(), argument(Unavailable("no way"))]),
        site("elsewhere", 0x40, [argument(), argument(Register("x1"))]),
    )
    refusals = engine.arm(TICKET, target(found, predicate=where("arg1 == 1")))
    assert {refusal.site.name: refusal.reason for refusal in refusals} == {
        "lacks": "it has 1 arguments, so there is no arg1 to filter by",
        "unreadable": "cannot filter by arg1: no way",
        "elsewhere": "cannot filter by arg1: 8@%rdi: tracefs has no name for this register on x86-64",
    }
    ((line,),) = tracefs.definitions.values()
    assert ":0x10 " in line
    assert sink.batches == []


def test_strings_are_refused_where_they_could_bring_the_host_down(
    engine: FtraceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "panics_on_warning", lambda: True)
    reason = engine.why_not(Capture(0, is_string=True), argument(), "x86-64")
    assert reason is not None
    assert "kernel.panic_on_warn" in reason
    assert engine.why_not(Capture(0), argument(), "x86-64") is None


@pytest.mark.parametrize("field", ["uid", "gid"])
def test_what_the_engine_does_not_know_is_refused(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink, field: str
) -> None:
    refusals = engine.arm(TICKET, target(predicate=where(f"execname == 'a' && {field} == 0"), is_ephemeral=True))
    assert {refusal.reason for refusal in refusals} == {
        f"the ftrace engine cannot filter by {field}; the bpf engine can"
    }
    assert len(refusals) == 3
    assert (tracefs.definitions, len(tracefs.instances()), sink.batches) == ({}, 1, [])


def test_excluded_processes_that_leave_events_all_the_same_are_filtered(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    engine.arm(TICKET, target(exclude_pids=frozenset({7}), exclude_later=frozenset({8})))
    (kernel,) = kernels(tracefs)
    (instance,) = tracefs.instances()
    put(tracefs, instance, *(kernel.record(0, tid=tid, q0=tid) for tid in (7, 8, 9)))
    wait_for(lambda: sink.values() == [(1, 9)], "the event")
    assert sink.filtered_count == 2


def test_ring_is_set_up_before_anything_writes_to_it(tracefs: FakeTracefs, sink: RecordingSink) -> None:
    (instance,) = tracefs.instances()
    assert tracefs.attempts == [
        f"instances mkdir {instance}",
        f"instances/{instance}/trace_clock mono",
        f"instances/{instance}/options/overwrite 0",
        f"instances/{instance}/buffer_size_kb 64",
        f"instances/{instance}/buffer_percent 25",
    ]
    assert sink.batches == []


def test_close_delivers_what_is_left_and_tells_the_last_losses(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    engine.arm(TICKET, target())
    (kernel,) = kernels(tracefs)
    (instance,) = tracefs.instances()
    cpu = online_cpus()[-1]
    for _ in range(10):
        put(tracefs, instance, *[kernel.record(0, q0=1)] * 50, cpu=cpu)
    tracefs.drop(instance, cpu, 7)
    (name,) = tracefs.definitions
    tracefs.hits[name] = 500 + 7 + 2
    engine.close(TICKET)
    assert len(sink.values()) == 500
    # two more hits than the ring says anything of: records larger than a page
    assert sum(count for stage, count in sink.losses if stage is LossStage.KERNEL_BUFFER) == 9
    assert all(batch.cpu.tolist() == [cpu] * len(batch) for batch in sink.batches)


@pytest.mark.usefixtures("sink")
def test_exclusion_that_the_kernel_refused_is_tried_again(tracefs: FakeTracefs, engine: FtraceEngine) -> None:
    wanted = target(exclude_pids=frozenset({os.getpid()}))
    tracefs.refuse = lambda path, _line: path.endswith("/set_event_notrace_pid")
    with pytest.raises(TracefsRejectedError, match="set_event_notrace_pid"):
        engine.arm(TICKET, wanted)
    tracefs.refuse = lambda _path, _line: False
    tracefs.attempts.clear()
    assert engine.arm(TICKET, wanted) == []
    assert any("/set_event_notrace_pid " in attempt for attempt in tracefs.attempts)


def test_hits_of_the_excluded_are_no_loss(tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink) -> None:
    engine.arm(TICKET, target(exclude_pids=frozenset({os.getpid()})))
    (instance,) = tracefs.instances()
    assert any(
        attempt.startswith(f"instances/{instance}/set_event_notrace_pid ") and str(os.getpid()) in attempt
        for attempt in tracefs.attempts
    )
    (name,) = tracefs.definitions
    tracefs.hits[name] = 1000
    tracefs.drop(instance, 0, 4)
    engine.close(TICKET)
    assert sink.losses == [(LossStage.KERNEL_BUFFER, 4)]


def test_losses_are_told_while_it_runs(tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink) -> None:
    engine.arm(TICKET, target())
    (instance,) = tracefs.instances()
    tracefs.drop(instance, 0, 5)
    wait_for(lambda: sink.losses == [(LossStage.KERNEL_BUFFER, 5)], "the loss")
    tracefs.drop(instance, 0, 8)
    wait_for(lambda: sink.losses[1:] == [(LossStage.KERNEL_BUFFER, 3)], "the next loss")


def test_records_of_several_cpus_come_in_the_order_of_time(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    cpus = online_cpus()
    if len(cpus) < 2:
        pytest.skip("one CPU")
    engine.arm(TICKET, target())
    (kernel,) = kernels(tracefs)
    (instance,) = tracefs.instances()
    start = 0

    def put_both() -> None:
        nonlocal start
        sink.before_delivery = lambda: None
        # in the future of the sweeps that read them, so that both pages wait for their moment
        start = time.monotonic_ns() + 100_000_000
        for number, cpu in enumerate(cpus[:2]):
            tracefs.put_page(
                instance,
                cpu,
                page(start + number, *(Data(2, kernel.record(0, q0=2 * row + number)) for row in range(20))),
            )

    # the reader itself, so that none of its sweeps sees one of them alone
    sink.before_delivery = put_both
    put(tracefs, instance, kernel.record(0, q0=99))
    wait_for(lambda: len(sink.values()) == 41, "the events")
    assert time.monotonic_ns() > start
    assert sink.values() == [(1, 99), *((1, number) for number in range(40))]


def test_what_cannot_be_decoded_is_lost_and_counted(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    engine.arm(TICKET, target())
    (kernel,) = kernels(tracefs)
    (instance,) = tracefs.instances()
    put(tracefs, instance, Kernel(kernel.fetch_arguments, 99).record(0), kernel.record(0, q0=1))
    wait_for(lambda: sink.values() == [(1, 1)], "the good event")
    assert sink.losses == [(LossStage.DECODE, 1)]
    # a site that the plan does not have is a bug, which costs these records and not the thread
    put(tracefs, instance, kernel.record(1000), kernel.record(0, q0=2))
    wait_for(lambda: sink.losses[1:] == [(LossStage.DECODE, 2)], "the loss")
    put(tracefs, instance, kernel.record(0, q0=3))
    wait_for(lambda: sink.values()[1:] == [(1, 3)], "the next event")


def test_sites_that_the_kernel_refuses_are_found_among_many(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    found = sample_object(*(site(f"n{number}", 16 * number) for number in range(50)))
    refused = {f":{16 * number:#x} " for number in (3, 17, 18, 49)}
    tracefs.refuse = lambda _path, line: line.startswith("p:") and any(place in line for place in refused)
    refusals = engine.arm(TICKET, target(found))
    assert sorted(refusal.site.name for refusal in refusals) == ["n17", "n18", "n3", "n49"]
    assert all("the test refuses" in refusal.reason for refusal in refusals)
    armed = [line for lines in tracefs.definitions.values() for line in lines]
    assert len(armed) == 46
    assert len(tracefs.enabled) == len(tracefs.definitions)
    assert sink.losses == []


def test_event_that_cannot_be_enabled_leaves_nothing(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    tracefs.refuse = lambda path, _line: path.endswith("/enable")
    assert len(engine.arm(TICKET, target())) == 3
    assert (tracefs.definitions, tracefs.enabled) == ({}, set())
    tracefs.refuse = lambda _path, _line: False
    assert engine.arm(TICKET, target()) == []
    assert sink.batches == []


def test_passing_object_has_a_ring_of_its_own_which_goes_with_it(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    passing = sample_object(site("p", 1, [argument(Register("rdi"))]), inode=2)
    engine.arm(TICKET, target())
    (shared,) = tracefs.instances()
    read_with = alive(Decoder), engine.metrics().rings
    engine.arm(TICKET, target(passing, is_ephemeral=True))
    assert alive(Decoder) > read_with[0]
    (own,) = set(tracefs.instances()) - {shared}
    first, second = kernels(tracefs)
    put(tracefs, shared, first.record(0, q0=1))
    put(tracefs, own, second.record(0, q0=2))
    engine.disarm(TICKET, passing)
    assert sorted(sink.values()) == [(1, 1), (1, 2)]
    assert tracefs.instances() == [shared]
    assert len(tracefs.definitions) == 1
    # what it was read with is forgotten, however many come and go
    wait_for(lambda: (alive(Decoder), engine.metrics().rings) == read_with, "it to be forgotten")


def test_disarmed_object_may_come_back(tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink) -> None:
    engine.arm(TICKET, target())
    engine.disarm(TICKET, FOUND)
    assert tracefs.enabled == set()
    assert len(tracefs.definitions) == 1
    engine.arm(TICKET, target())
    assert len(tracefs.enabled) == len(tracefs.definitions) == 1
    engine.disarm(TICKET, sample_object(inode=77))
    assert tracefs.enabled
    assert sink.losses == []


def test_two_subscriptions_do_not_touch_each_other(
    tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink
) -> None:
    other = RecordingSink()
    engine.open(2, other, 64)
    engine.arm(TICKET, target())
    engine.arm(2, target())
    engine.close(2)
    (instance,) = tracefs.instances()
    (kernel,) = kernels(tracefs)
    put(tracefs, instance, kernel.record(0, q0=9))
    wait_for(lambda: sink.values() == [(1, 9)], "the event")
    assert other.batches == []
    assert len(tracefs.enabled) == 1


@pytest.mark.parametrize("step", ["mkdir", "mono", "/options/overwrite", "/buffer_size_kb", "/buffer_percent"])
def test_subscription_that_cannot_begin_leaves_nothing(tracefs: FakeTracefs, engine: FtraceEngine, step: str) -> None:
    tracefs.refuse = lambda path, line: step in f"{path} {line}"
    before = descriptors(os.getpid())
    sinks = alive(RecordingSink)
    with pytest.raises(TracefsRejectedError):
        engine.open(TICKET, RecordingSink(), 64)
    assert tracefs.instances() == []
    wait_for(lambda: alive(RecordingSink) == sinks, "the sink to be forgotten")
    assert descriptors(os.getpid()) == before


def test_instance_that_cannot_be_removed_hides_no_error_and_goes_later(
    tracefs: FakeTracefs, engine: FtraceEngine
) -> None:
    tracefs.refuse = lambda path, line: path.endswith("/buffer_size_kb") or line.startswith("rmdir")
    with pytest.raises(TracefsRejectedError, match="buffer_size_kb"):
        engine.open(TICKET, RecordingSink(), 64)
    assert len(tracefs.instances()) == 1
    tracefs.refuse = lambda _path, _line: False
    engine.retry_cleanup()
    assert tracefs.instances() == []


def test_ring_that_cannot_be_opened_closes_the_others(tracefs: FakeTracefs, engine: FtraceEngine) -> None:
    def goes_offline(path: str, _line: str) -> bool:
        if path.endswith("/buffer_percent"):
            tracefs.take_offline(path.split("/")[1], online_cpus()[-1])
        return False

    tracefs.refuse = goes_offline
    before = descriptors(os.getpid())
    with pytest.raises(FileNotFoundError):
        engine.open(TICKET, RecordingSink(), 64)
    assert descriptors(os.getpid()) == before
    assert tracefs.instances() == []


def test_close_does_all_that_can_be_done(
    tracefs: FakeTracefs, engine: FtraceEngine, caplog: pytest.LogCaptureFixture
) -> None:
    # what is logged keeps what raised it, and with that the sink
    caplog.set_level("ERROR", "stapsdtd")
    sinks = alive(RecordingSink)
    sink = RecordingSink()
    engine.open(TICKET, sink, 64)
    passing = sample_object(site("p", 1), inode=2)
    engine.arm(TICKET, target())
    engine.arm(TICKET, target(passing, is_ephemeral=True))
    first, second = tracefs.instances()
    tracefs.refuse = lambda _path, line: line == f"rmdir {second}"
    engine.close(TICKET)
    assert tracefs.instances() == [second]
    assert tracefs.enabled == set()
    assert sink.losses == []
    del sink
    wait_for(lambda: alive(RecordingSink) == sinks, "the sink to be forgotten")
    assert first not in tracefs.instances()
    # what was busy goes with the next that goes
    tracefs.refuse = lambda _path, _line: False
    engine.open(TICKET + 1, RecordingSink(), 64)
    engine.close(TICKET + 1)
    assert tracefs.instances() == []
    assert (engine.metrics().groups, tracefs.definitions) == (0, {})


def test_shutdown_ends_all_subscriptions_whatever_fails(tracefs: FakeTracefs) -> None:
    engine = FtraceEngine(tracefs, OWNER, pids_of, Descendants())
    for subscription_key in range(3):
        engine.open(subscription_key, RecordingSink(), 64)
        engine.arm(subscription_key, target())
    bad = tracefs.instances()[1]
    tracefs.refuse = lambda _path, line: line == f"rmdir {bad}"
    engine.shutdown()
    assert tracefs.instances() == [bad]
    assert tracefs.enabled == set()
    assert READER not in {thread.name for thread in threading.enumerate()}


def test_rings_of_all_subscriptions_are_bounded(tracefs: FakeTracefs) -> None:
    each = 64 * 1024 * len(online_cpus())
    engine = FtraceEngine(tracefs, OWNER, pids_of, Descendants(), 2 * each)
    for subscription_key in (1, 2):
        engine.open(subscription_key, RecordingSink(), 64)
    with pytest.raises(LimitReachedError, match="64 KiB for each CPU are more than is left"):
        engine.open(3, RecordingSink(), 64)
    (refusal,) = engine.arm(1, target(is_ephemeral=True))[:1]
    assert "more than is left" in refusal.reason
    engine.close(2)
    assert engine.arm(1, target(is_ephemeral=True)) == []
    engine.disarm(1, FOUND)
    engine.open(3, RecordingSink(), 64)
    engine.shutdown()
    assert tracefs.instances() == []


def test_threads_are_looked_up_once_for_each_page_of_them(tracefs: FakeTracefs) -> None:
    asked: list[int] = []

    def processes(tids: I32) -> I32:
        asked.append(len(tids))
        return np.full_like(tids, 42)

    engine = FtraceEngine(tracefs, OWNER, processes, Descendants())
    sink = RecordingSink()
    engine.open(TICKET, sink, 64)
    engine.arm(TICKET, target())
    (kernel,) = kernels(tracefs)
    put(tracefs, tracefs.instances()[0], *[kernel.record(0, tid=7, q0=1)] * 40)
    wait_for(lambda: asked == [40], "the look-up")
    engine.shutdown()
    assert [batch.pid.tolist() for batch in sink.batches] == [[42] * 40]


@pytest.mark.usefixtures("sink")
def test_event_that_cannot_be_removed_harms_no_other_subscription(tracefs: FakeTracefs, engine: FtraceEngine) -> None:
    """Another tool may have it enabled elsewhere."""
    engine.arm(TICKET, target())
    tracefs.refuse = lambda _path, line: line.startswith("-:")
    engine.close(TICKET)
    engine.open(TICKET + 1, RecordingSink(), 64)
    assert engine.arm(TICKET + 1, target()) == []
    tracefs.refuse = lambda _path, _line: False
    engine.close(TICKET + 1)
    assert (engine.metrics().groups, tracefs.definitions) == (0, {})


def test_figures_are_of_all_rings_by_cpu(tracefs: FakeTracefs, engine: FtraceEngine, sink: RecordingSink) -> None:
    assert sink.batches == []
    engine.arm(TICKET, target())
    figures = engine.metrics()
    assert (figures.attachments, figures.groups) == (len(FOUND.parsed.sites), len(tracefs.definitions))
    cpus = online_cpus()
    engine.open(TICKET + 1, RecordingSink(), 128)
    first, _ = tracefs.instances()
    stats = tracefs.folder / "instances" / first / "per_cpu" / f"cpu{cpus[0]}" / "stats"
    stats.write_text(stats.read_text() + "bytes: 4711\n")
    rings = wait_for(lambda: [ring for ring in engine.metrics().rings if ring.filled_bytes], "the figures to be read")
    assert rings == [RingMetrics(f"cpu{cpus[0]}", 4711, (64 + 128) * 1024)]
    assert [ring.name for ring in engine.metrics().rings] == [f"cpu{cpu}" for cpu in cpus]
    engine.close(TICKET + 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_reader_that_ended_and_tracefs_that_is_gone_are_problems(tracefs: FakeTracefs) -> None:
    def exits(_tids: I32) -> I32:
        raise SystemExit

    engine = FtraceEngine(tracefs, OWNER, exits, Descendants())
    path = tracefs.folder / "uprobe_events"
    problem = engine.problem()
    assert problem is not None
    assert problem.startswith(f"write to {path}: No such file or directory; it is not there: mount it with 'mount ")
    path.touch()
    assert engine.problem() is None
    engine.ask().result(20)
    engine.open(TICKET, RecordingSink(), 64)
    engine.arm(TICKET, target())
    put(tracefs, tracefs.instances()[0], kernels(tracefs)[0].record(0, q0=1))
    assert wait_for(engine.problem, "the problem") == "the thread that reads events ended; restart the daemon"
    with pytest.raises(ThreadEndedError):
        engine.ask().result()
    with pytest.raises(ThreadEndedError):
        engine.open(TICKET + 1, RecordingSink(), 64)
    # nothing stays armed all the same
    with pytest.raises(ThreadEndedError):
        engine.shutdown()
    assert (tracefs.instances(), tracefs.definitions) == ([], {})
