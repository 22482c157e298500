"""Spans that are calls of kernel functions: each return has its own entry, and tells whatever was captured of that."""

from __future__ import annotations

import itertools
import os
import struct

import pytest

from stapsdtd.aggregate.aggregation import Aggregation, Function, Row
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.pairs import why_not
from stapsdtd.capture.bpf.reading import Channel
from stapsdtd.capture.bpf.span_kinds import SPANS_OF_RECORDS
from stapsdtd.capture.bpf.span_tables import SpanTables
from stapsdtd.capture.bpf.span_watch import SpanWatch
from stapsdtd.capture.bpf.table_memory import TableMemory
from stapsdtd.capture.engine import Refusal, Target, TargetSite
from stapsdtd.events.columns import CUT
from stapsdtd.model import Argument, BuiltIn, Capture, Constant, Memory, Register, Site, StartArgument, Unavailable
from stapsdtd.query.actions import Aggregate, BeginSpan, Emit, EndSpan
from stapsdtd.spans.span import Span, SpanCounts, of_start
from tests.support import wait_for
from tests.unit.bpf_rig import closed, where
from tests.unit.fake_bpf import FakeKernel
from tests.unit.samples import argument, sample_object, site
from tests.unit.test_bpf_spans import SpanSink

pytestmark = pytest.mark.timeout(60)

NAME, SIZE, COUNT, FILE = Capture(0, is_string=True, max_bytes=16), Capture(1), Capture(2), Capture(3)
ENTRY_ARGUMENTS = (
    argument(Register("rdi")),
    argument(Register("rsi"), 4, signed=True),
    argument(Constant(7)),
    argument(Memory("rdx"), 12, text="12@(%rdx)"),
)
RESULT = argument(Register("rax"), 4, signed=True)
SPAN = Span(start_captures=(NAME, SIZE, COUNT, FILE), is_of_calls=True)
OF_START = tuple(map(of_start, SPAN.start_captures))
TOLD = (Capture(0), *OF_START)
FRAME = 0xFFFFC900_00001000
OPEN, CLOSE = "do_open", "do_close"


def entry(function: str = OPEN, arguments: tuple[Argument, ...] = ENTRY_ARGUMENTS) -> Site:
    return site("entry", 0x10 if function == OPEN else 0x30, arguments, function=function)


def returns(function: str = OPEN) -> Site:
    return site("return", 0x20 if function == OPEN else 0x40, [RESULT], function=function)


def armed(
    engine: BpfEngine,
    kernel: FakeKernel,
    action: Emit | Aggregate,
    span: Span = SPAN,
    *,
    entries: tuple[Site, ...] = (entry(),),
    ends: tuple[Site, ...] = (returns(),),
    of_pairs: str = "",
) -> tuple[SpanSink, list[Refusal]]:
    sink = SpanSink()
    engine.open(1, sink, 64, "me", sink)
    end = EndSpan(span, action, where(of_pairs) if of_pairs else None)
    sites = [TargetSite(each, 1, end) for each in ends] + [TargetSite(each, 2, BeginSpan(span)) for each in entries]
    return sink, engine.arm(1, Target(sample_object(*entries, *ends), kernel.path, tuple(sites)))


def tracing(engine: BpfEngine, kernel: FakeKernel, of_pairs: str = "") -> SpanSink:
    sink, refusals = armed(engine, kernel, Emit(TOLD), of_pairs=of_pairs)
    assert refusals == []
    return sink


class Calls:
    """Of one thread. text: what a name is found at."""

    def __init__(self, kernel: FakeKernel, pid: int = 10) -> None:
        self._kernel = kernel
        self._pid = pid
        self._addresses = itertools.count(0x1000 * pid, 0x100)

    def enter(
        self, depth: int, size: int = 0, name: bytes | None = b"", function: str = OPEN, file: bytes = bytes(12)
    ) -> None:
        at, there = next(self._addresses), next(self._addresses)
        if name is not None:
            self._kernel.memory[at] = name + b"\0"
        self._kernel.memory[there] = file
        offset, frame = entry(function).site_offset, FRAME - 0x100 * depth
        self._kernel.hit(offset, pid=self._pid, rsp=frame, rdi=at, rsi=size % (1 << 32), rdx=there)

    def leave(self, depth: int, result: int = 0, function: str = OPEN) -> None:
        """What a return takes off the stack is missing there."""
        offset, frame = returns(function).site_offset, FRAME - 0x100 * depth
        self._kernel.hit(offset, pid=self._pid, rsp=frame + 8, rax=result % (1 << 32))


@pytest.fixture
def calls(kernel: FakeKernel) -> Calls:
    return Calls(kernel)


def test_return_tells_of_its_own_entry(kernel: FakeKernel, engine: BpfEngine, calls: Calls) -> None:
    """However calls are nested, and whatever other threads are in."""
    sink, other = tracing(engine, kernel), Calls(kernel, 11)
    calls.enter(0, -1, b"outer", file=b"outer's file")
    other.enter(0, 5, b"of another", file=b"another file")
    for depth in range(1, 40):
        calls.enter(depth, depth, b"inner %d" % depth)
    for depth in reversed(range(1, 40)):
        calls.leave(depth, -depth)
    calls.leave(0, 1)
    other.leave(0, 2)
    calls.leave(0, 3)
    closed(engine, 1)
    inner = [(1, -depth, b"inner %d" % depth, depth, 7, bytes(12)) for depth in reversed(range(1, 40))]
    outer = [(1, 1, b"outer", -1, 7, b"outer's file"), (1, 2, b"of another", 5, 7, b"another file")]
    assert sink.values == inner + outer
    assert sink.counts == SpanCounts(starts=41, paired=41, unmatched=1)
    assert sink.fired_count == sink.accounted == 83


def test_condition_on_the_result_is_tested_where_it_returns(
    kernel: FakeKernel, engine: BpfEngine, calls: Calls
) -> None:
    sink = tracing(engine, kernel, of_pairs="elapsed < 0 || arg0 < 0")
    for number in range(100):
        calls.enter(0, number, b"file %d" % number)
        calls.leave(0, -2 if number % 50 == 0 else number)
    (table,) = kernel.loaded.spans.tables.values()
    assert not table.by_key
    closed(engine, 1)
    assert [values[1:4] for values in sink.values] == [(-2, b"file 0", 0), (-2, b"file 50", 50)]
    assert (sink.filtered_count, sink.counts) == (98, SpanCounts(starts=100, paired=100))
    assert sink.fired_count == sink.accounted == 200


def test_what_an_entry_could_not_read_is_unavailable(kernel: FakeKernel, engine: BpfEngine, calls: Calls) -> None:
    sink = tracing(engine, kernel)
    calls.enter(0, 1, None)
    calls.enter(1, 2, b"there")
    calls.enter(2, 3, b"longer than can be kept", file=b"short")
    for depth in (2, 1, 0):
        calls.leave(depth)
    closed(engine, 1)
    assert [values[2:4] for values in sink.values] == [(b"longer than can " + CUT, 3), (b"there", 2), (None, 1)]
    assert [values[5] for values in sink.values] == [None, bytes(12), bytes(12)]
    # of what is kept, nobody brings anything in
    assert kernel.touched == []


def test_call_whose_return_was_missed_is_over_when_another_one_is_in_its_place(
    kernel: FakeKernel, engine: BpfEngine, calls: Calls
) -> None:
    sink = tracing(engine, kernel)
    calls.enter(0, 1, b"outer")
    calls.enter(1, 2, b"missed")
    calls.enter(1, 3, b"inner")
    calls.leave(1)
    calls.leave(0)
    closed(engine, 1)
    assert [values[2] for values in sink.values] == [b"inner", b"outer"]
    assert sink.counts == SpanCounts(starts=3, paired=2, nested=1)
    assert sink.fired_count == sink.accounted == 5


@pytest.mark.parametrize("captures", [(), (SIZE,), (NAME,)])
def test_tail_calls_are_told_apart(
    kernel: FakeKernel, engine: BpfEngine, calls: Calls, captures: tuple[Capture, ...]
) -> None:
    """What a function calls in place of its return has its frame, and both return at once."""
    functions = (OPEN, CLOSE)
    sink, refusals = armed(
        engine,
        kernel,
        Emit((Capture(0), *map(of_start, captures))),
        Span(start_captures=captures, is_of_calls=True),
        entries=tuple(map(entry, functions)),
        ends=tuple(map(returns, functions)),
    )
    assert refusals == []
    calls.enter(0, 1, b"1")
    calls.enter(0, 2, b"2", CLOSE)
    calls.leave(0, 2, CLOSE)
    calls.leave(0, 1)
    closed(engine, 1)
    expected = {(): (), (SIZE,): (2, 1), (NAME,): (b"2", b"1")}[captures]
    assert [values[1] for values in sink.values] == [2, 1]
    assert tuple(value for values in sink.values for value in values[2:]) == expected
    assert sink.counts == SpanCounts(starts=2, paired=2)


def test_calls_are_added_up(kernel: FakeKernel, engine: BpfEngine, calls: Calls) -> None:
    span = Span(start_captures=(SIZE,), is_of_calls=True, is_added=True)
    by_size = Aggregation((Function.COUNT,), (Capture(StartArgument(1)),))
    sink, refusals = armed(engine, kernel, Aggregate(by_size), span)
    assert refusals == []
    for depth, size in enumerate((-3, 5, -3)):
        calls.enter(depth, size)
    for depth in (2, 1, 0):
        calls.leave(depth)
    closed(engine, 1)
    assert sink.added == {(0, (-3,)): Row(2), (0, (5,)): Row(1)}
    assert sink.counts == SpanCounts(starts=3, paired=3)


def test_returns_before_the_first_entry_is_known_end_nothing(
    kernel: FakeKernel, engine: BpfEngine, calls: Calls
) -> None:
    """How much is kept of an entry, only one of them can tell."""
    sink, refusals = armed(engine, kernel, Emit(TOLD), entries=())
    assert refusals == []
    calls.leave(0)
    assert kernel.loaded.spans.tables == {}
    found = Target(sample_object(entry(), inode=2), kernel.path, (TargetSite(entry(), 2, BeginSpan(SPAN)),))
    assert engine.arm(1, found) == []
    calls.enter(0, 1, b"first")
    calls.leave(0)
    closed(engine, 1)
    assert sink.values == [(1, 0, b"first", 1, 7, bytes(12))]
    assert sink.counts == SpanCounts(starts=1, paired=1, unmatched=1)
    engine.retry_cleanup()
    wait_for(lambda: kernel.loaded.spans.tables == {}, "the table to be gone")


def test_entry_of_another_kind_is_refused(kernel: FakeKernel, engine: BpfEngine) -> None:
    """What a return finds is the same for all entries."""
    others = (argument(Register("rdi")), argument(Register("rsi"), 8), *ENTRY_ARGUMENTS[2:])
    gone = (argument(Unavailable("it is gone")), *ENTRY_ARGUMENTS[1:])
    for number, (arguments, reason) in enumerate(
        [(others, "arg1 is unsigned, and that of another start signed"), (gone, "arg0 is unavailable, and that of")]
    ):
        misfit = site("entry", 0x50 + number, arguments, function=CLOSE)
        _, refusals = armed(engine, kernel, Emit(TOLD), entries=(entry(), misfit))
        assert [refusal.site for refusal in refusals] == [misfit]
        assert reason in refusals[0].reason
        closed(engine, 1)


def test_table_is_as_large_as_what_is_kept(kernel: FakeKernel, engine: BpfEngine) -> None:
    for max_bytes, kind, most in [(16, 0, 6990), (1000, 1, 1963), (4096, 2, 506)]:
        name = Capture(0, is_string=True, max_bytes=max_bytes)
        span = Span(start_captures=(name,), is_of_calls=True)
        _, refusals = armed(engine, kernel, Emit((of_start(name),)), span)
        assert refusals == []
        (table,) = kernel.loaded.spans.tables.values()
        assert (table.kind, table.max_entries) == (SPANS_OF_RECORDS[kind], most)
        assert engine.metrics().table_bytes > most * table.kind.entry_bytes
        closed(engine, 1)
        engine.retry_cleanup()
        wait_for(lambda: engine.metrics().table_bytes == 0, "the table to be gone")


def test_as_many_functions_as_can_be_traced_have_their_tables(kernel: FakeKernel, engine: BpfEngine) -> None:
    """The more there are, the less room each of them has."""
    for number in range(1, 66):
        sink = SpanSink()
        engine.open(number, sink, 64, "me", sink)
        action = EndSpan(SPAN, Emit(TOLD))
        sites = (TargetSite(returns(), 1, action), TargetSite(entry(), 2, BeginSpan(SPAN)))
        found = sample_object(*(each.site for each in sites), path=f"/{number}", inode=number)
        refusals = engine.arm(number, Target(found, kernel.path, sites))
        expected = "have 64 spans, which is the limit" if number == 65 else ""
        assert all(expected in each.reason for each in refusals)
        assert len(refusals) == (2 if expected else 0)
    sizes = [table.max_entries for table in kernel.loaded.spans.tables.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 100


def test_full_table_is_told(kernel: FakeKernel, engine: BpfEngine, calls: Calls) -> None:
    span = Span(start_captures=(NAME,), is_of_calls=True, max_open=2)
    sink, _ = armed(engine, kernel, Emit((OF_START[0],)), span)
    for depth in range(3):
        calls.enter(depth, name=b"%d" % depth)
    for depth in (2, 1, 0):
        calls.leave(depth)
    closed(engine, 1)
    assert [values[1] for values in sink.values] == [b"1", b"0"]
    assert sink.counts == SpanCounts(starts=3, paired=2, table_full=1, unmatched=1)


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (Span(start_captures=(NAME,) * 33, is_of_calls=True), "at most 32 values"),
        (Span(start_captures=(Capture(0, is_string=True),) * 8, is_of_calls=True), "may take 32848 bytes"),
        (Span(start_captures=(NAME,), is_of_calls=True, is_added=True), "no strings"),
        (Span(start_captures=(SIZE,), is_nested=True, is_of_calls=True, is_added=True), "one start for each key"),
        (Span(is_nested=True, is_of_calls=True), None),
        (Span(start_captures=(Capture(0, is_string=True),) * 7, is_of_calls=True), None),
        (Span(start_captures=(SIZE,) * 12, is_of_calls=True), None),
    ],
)
def test_what_the_kernel_can_keep(span: Span, reason: str | None) -> None:
    told = why_not(span)
    assert (told is None) is (reason is None)
    assert reason is None or reason in str(told)


@pytest.mark.parametrize("captures", [(), (NAME,)])
def test_calls_that_never_return_go_with_their_threads(kernel: FakeKernel, captures: tuple[Capture, ...]) -> None:
    sink, tables = SpanSink(), SpanTables(kernel.loaded, TableMemory())
    table = tables.open(Channel(1, sink), "me", Span(start_captures=captures, is_of_calls=True))
    if captures:
        tables.keep(table, table.kept_of(entry(), "x86-64"))
    (waiting,) = kernel.loaded.spans.tables.values()
    # the largest thread id of the kernel's is less
    for tid, frame in [(os.getpid(), 1), (1 << 22, 1), (1 << 22, 2), (0, 1)]:
        waiting.by_key[struct.pack("=QQII", 1 << 40, frame, 5, tid)] = bytes(table.kind.entry_bytes)
    watch = SpanWatch(tables, lambda work: work(), clock=itertools.count(0.0, 10.0).__next__)
    watch.look()
    assert sink.counts == SpanCounts(died=2)
    # idle CPUs' tasks are alive
    assert [struct.unpack("=QQII", key)[3] for key in waiting.by_key] == [os.getpid(), 0]
    assert kernel.loaded.spans.attached == []


def test_elapsed_time_is_known_of_calls(kernel: FakeKernel, engine: BpfEngine, calls: Calls) -> None:
    sink, _ = armed(engine, kernel, Emit((Capture(BuiltIn.ELAPSED), OF_START[0])))
    calls.enter(0, name=b"slow")
    calls.leave(0)
    closed(engine, 1)
    ((_, elapsed, name),) = sink.values
    assert 0 < elapsed < 60_000_000_000
    assert name == b"slow"
