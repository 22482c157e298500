"""Kernel functions are traced alike whichever way they are attached to, and whatever else the host would offer."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.aggregate.aggregation import Aggregation, Function
from stapsdtd.arch.registry import of_host
from stapsdtd.capture.bpf import function_links
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.groups import Attachments
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import LossStage, Target, TargetSite
from stapsdtd.capture.names import Owner
from stapsdtd.functions.attaching import FENTRY, KPROBE, MULTI
from stapsdtd.functions.chain import Chain
from stapsdtd.functions.kernel import make_kernel_functions, ways_to_attach
from stapsdtd.functions.probes import objects_of
from stapsdtd.functions.selectors import parse
from stapsdtd.kernel.function_hooks import HookTrials
from stapsdtd.kernel.function_links import tells_missed_entries
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Capture, Object
from stapsdtd.query.actions import Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.query.parse import parse as parse_condition
from stapsdtd.spans.span import Span, of_start
from tests.kernel.test_chains import EventSink
from tests.kernel.test_function_tracing import SIZE, calls, program, with_kprobes
from tests.kernel.test_kernel_aggregation import AddingSink
from tests.kernel.test_kernel_spans import SpanSink
from tests.support import Ticker, require, wait_for

__all__ = ["calls", "program"]

pytestmark = [pytest.mark.kernel, pytest.mark.vm, with_kprobes]

THREADS, TIMES, BYTES = 4, 5000, 100
NAMES = "vfs_read", "vfs_statx"
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def hooks() -> HookTrials:
    return HookTrials()


@pytest.fixture(scope="module")
def functions(hooks: HookTrials) -> Object:
    return looked_up(hooks, *NAMES)


def looked_up(hooks: HookTrials, *texts: str) -> Object:
    found = make_kernel_functions(hooks)
    try:
        lookup = found.functions("test", [parse(text) for text in texts]).result(PATIENCE_SECONDS)
    finally:
        found.stop()
    architecture = of_host()
    assert architecture is not None
    (made,) = objects_of(lookup.functions, lookup.ways, architecture.name)
    return made


WAYS = [{FENTRY}, {MULTI}, {KPROBE}]


@pytest.fixture(params=WAYS)
def ways(request: pytest.FixtureRequest, hooks: HookTrials) -> set[str]:
    ways: set[str] = request.param
    if missing := ways - {*ways_to_attach(hooks)}:
        pytest.skip(f"this kernel has no {missing.pop()}")
    return ways


@pytest.fixture
def engine(ways: set[str]) -> Iterator[BpfEngine]:
    loaded, paging = Loaded(), Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    attachments = Attachments.of(loaded, Tracefs.locate(), lambda: ways)
    made = BpfEngine(Tracefs.locate(), Owner.this_process(), loaded, paging, attachments=attachments)
    try:
        yield made
    finally:
        made.shutdown()


def patched() -> set[str]:
    """The functions that ftrace patches at present."""
    return {line.split()[0] for line in Tracefs.locate().read("enabled_functions").splitlines()} & {*NAMES}


def test_calls_are_exact(engine: BpfEngine, ways: set[str], functions: Object, calls: Ticker) -> None:
    """What a task misses since another one, interrupted, is in the program there is told, and not added up."""
    added = Aggregate(Aggregation((Function("count"),)))
    sinks = []
    for subscription_key, (name, argument) in enumerate({"entry": "arg2", "return": "arg0"}.items(), 1):
        of_reads = parse_condition(f"pid == {calls.pid} && {argument} == {BYTES}", lambda _: None)
        none = parse_condition("pid == 0", lambda _: None)
        sites = [site for site in functions.parsed.sites if site.name == name]
        wanted = [
            TargetSite(site, number, added, predicate=of_reads if site.function == "vfs_read" else none)
            for number, site in enumerate(sites, 1)
        ]
        sinks.append(AddingSink())
        engine.open(subscription_key, sinks[-1], 64, "client", sinks[-1])
        assert engine.arm(subscription_key, Target(functions, functions.path, tuple(wanted))) == []
    (way,) = ways
    if way != KPROBE:
        # not all machines have ftrace patch for these, too
        assert patched() == {*NAMES}
    of_events = {FENTRY: 0, MULTI: 2, KPROBE: 4}
    assert len(Tracefs.locate().kprobe_events()) == of_events[way]
    assert calls.do(f"read {BYTES} {TIMES} {THREADS}") == BYTES * TIMES * THREADS
    for subscription_key, sink in enumerate(sinks, 1):
        engine.close(subscription_key).result(PATIENCE_SECONDS)
        missed = sink.losses[LossStage.MISSED]
        assert sink.counted + missed == TIMES * THREADS
        assert sink.fired_count == sink.counted + sink.filtered_count + missed
        assert sink.losses.total() == missed
    wait_for(lambda: not patched() and not Tracefs.locate().kprobe_events(), "the functions to be detached from")


@pytest.mark.parametrize("ways", [*WAYS, {FENTRY, KPROBE}], indirect=True)
def test_returns_tell_of_their_entries(
    engine: BpfEngine, ways: set[str], hooks: HookTrials, calls: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls that satisfy a condition on their result alone, also if an entry was attached to before its return."""
    reads = looked_up(hooks, "vfs_read(file->f_path.dentry->d_name.name, file->f_inode->i_size, file->f_path)")
    entry, returns = reads.parsed.sites
    counting = TargetSite(entry, 1, Aggregate(Aggregation((Function("count"),))))
    if len(ways) > 1:
        monkeypatch.setattr(function_links, "MOST_AT_ONCE", 0)
        engine.open(1, AddingSink(), 64, "other client", AddingSink())
        assert engine.arm(1, Target(reads, reads.path, (counting,))) == []
        monkeypatch.undo()
    count, name, size, path = Capture(2), Capture(4, is_string=True, max_bytes=32), Capture(5), Capture(6)
    span = Span(start_captures=(name, count, size, path), is_of_calls=True)
    assert engine.why_not_paired(span) is None
    wanted = parse_condition(f"elapsed < 0 || arg0 == {BYTES}", lambda _: None)
    end = EndSpan(span, Emit((Capture(0), *map(of_start, span.start_captures))), wanted)
    of_process = parse_condition(f"pid == {calls.pid}", lambda _: None)
    sites = [
        TargetSite(site, 7, action, predicate=of_process) for site, action in ((returns, end), (entry, BeginSpan(span)))
    ]
    sink = SpanSink()
    engine.open(2, sink, 1024, "client", sink)
    assert engine.arm(2, Target(reads, reads.path, tuple(sites))) == []
    for each, threads in ((BYTES - 1, THREADS), (BYTES, 1)):
        assert calls.do(f"read {each} {TIMES // 10} {threads}") == each * TIMES // 10 * threads
    for subscription_key in range(2, 2 - len(ways), -1):
        engine.close(subscription_key).result(PATIENCE_SECONDS)
    # other calls are of the orders to the program, which come through a pipe
    times, missed = TIMES // 10, sink.losses[LossStage.MISSED]
    known = [values for values in sink.values if values[1] == b"known"]
    assert len(sink.values) == len(known) <= times <= len(known) + missed
    assert {values[:4] for values in known} == {(BYTES, b"known", BYTES, SIZE)}
    # struct path: two pointers of the kernel's
    assert {struct.unpack("=qq", values[4]) < (0, 0) for values in known} == {True}
    assert sink.counts.paired >= (THREADS + 1) * times - missed
    # of the calls that were rejected, each return once; and what other processes read meanwhile, which is little
    assert 0 <= sink.filtered_count - (sink.counts.paired - len(known)) < times // 10
    assert sink.counts.starts == sink.counts.paired + sink.counts.nested + sink.counts.open
    assert sink.counts.nested + sink.counts.open + sink.counts.unmatched <= missed + 2
    assert sink.fired_count == sink.told


@pytest.mark.parametrize("ways", [*WAYS, {FENTRY, KPROBE}], indirect=True)
def test_calls_that_led_to_each_other(
    engine: BpfEngine, ways: set[str], hooks: HookTrials, calls: Ticker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one of them is attached to in another way than the other."""
    outer, inner = "__x64_sys_pread64" if os.uname().machine == "x86_64" else "__arm64_sys_pread64", "vfs_read"
    reads = looked_up(hooks, outer, inner)
    chain = Chain(((reads.path, outer), (reads.path, inner)))
    of_process = parse_condition(f"pid == {calls.pid}", lambda _: None)
    sites = [
        TargetSite(site, 10 * (site.function == inner) + (site.name == "return"), Emit(()), None, of_process, link)
        for site in reads.parsed.sites
        for link in [chain.link_of(reads.path, site)]
    ]
    counting = [TargetSite(each.site, 1, Aggregate(Aggregation((Function("count"),)))) for each in sites]
    if len(ways) > 1:
        monkeypatch.setattr(function_links, "MOST_AT_ONCE", 0)
        engine.open(1, AddingSink(), 64, "other client", AddingSink())
        of_inner = tuple(each for each in counting if each.site.function == inner)
        assert engine.arm(1, Target(reads, reads.path, of_inner)) == []
        monkeypatch.undo()
    sink = EventSink()
    engine.open(2, sink, 1024, "client", sink)
    assert engine.arm(2, Target(reads, reads.path, tuple(sites))) == []
    assert calls.do(f"read {BYTES} {TIMES // 10} {THREADS}") == BYTES * TIMES // 10 * THREADS
    engine.close(2).result(PATIENCE_SECONDS)
    told, missed, times = Counter(sink.values), sink.losses[LossStage.MISSED], TIMES // 10 * THREADS
    assert {site for (site,) in told} == {0, 1, 10, 11}
    assert all(times - missed <= count <= times for count in told.values())
    # the command reads what it is told to do, which no pread64() leads to
    assert sink.filtered_count > 0
    assert sink.fired_count == sink.told


@pytest.mark.parametrize("ways", [{KPROBE}], indirect=True)
def test_what_kprobes_skip_is_told(engine: BpfEngine, hooks: HookTrials, calls: Ticker, tmp_path: Path) -> None:
    """The kernel runs no program of a kprobe in the middle of one of a tracepoint."""
    if not tells_missed_entries(os.uname().release):
        pytest.skip("this kernel does not count that")
    require(shutil.which("bpftrace") is not None, "bpftrace")
    reading = looked_up(hooks, "strncpy_from_user_nofault")
    sink = AddingSink()
    engine.open(1, sink, 64, "client", sink)
    counting = Aggregate(Aggregation((Function("count"),)))
    sites = tuple(TargetSite(site, 1, counting) for site in reading.parsed.sites if site.name == "entry")
    assert engine.arm(1, Target(reading, reading.path, sites)) == []
    program = (
        'BEGIN { printf("ready\\n") } '
        f"tracepoint:syscalls:sys_enter_openat /pid == {calls.pid}/ {{ @ = str(args->filename) }}"
    )
    with subprocess.Popen(["bpftrace", "-e", program], stdout=subprocess.PIPE, text=True) as other:
        output = other.stdout
        assert output is not None
        try:
            wait_for(lambda: "ready" in output.readline(), "bpftrace to be ready", PATIENCE_SECONDS)
            for _ in range(TIMES // 100):
                assert calls.do(f"open {tmp_path / 'known'}") > 0
        finally:
            other.send_signal(signal.SIGINT)
    engine.close(1).result(PATIENCE_SECONDS)
    assert sink.losses[LossStage.MISSED] >= TIMES // 100
    assert sink.fired_count == sink.counted + sink.losses[LossStage.MISSED]
