"""Spans whose key is the call: what entries were called with is kept in the kernel, and told with their returns.

The calls are of a program's function that has probes where the kernel's own are attached to.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import Target, TargetSite
from stapsdtd.capture.names import Owner
from stapsdtd.elf import parse_object
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import BuiltIn, Capture, Object, ObjectKey
from stapsdtd.query.actions import Action, BeginSpan, Emit, EndSpan
from stapsdtd.query.parse import parse
from stapsdtd.spans.span import Span, SpanCounts, of_start
from tests.kernel.test_kernel_spans import SpanSink
from tests.support import Ticker, compile_target, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.vm, pytest.mark.timeout(240)]

PATIENCE_SECONDS = 60
NAME, NUMBER, DEPTH = Capture(0, is_string=True, max_bytes=64), Capture(1), Capture(2)
BUFFER = Capture(0, max_bytes=2048, is_buffer=True)
RESULT, ELAPSED = Capture(0), Capture(BuiltIn.ELAPSED)


class Calls:
    """An engine that pairs calls of a running tests/targets/frames.c."""

    def __init__(self, engine: BpfEngine, path: Path, calls: Ticker) -> None:
        self._engine = engine
        self._path = path
        self._opened = 0
        self.calls = calls

    def trace(self, *kept: Capture, of_pairs: str = "", max_open: int = 10_000) -> SpanSink:
        """Pairs have the end's first argument, what is kept of entries, and the time."""
        span = Span(start_captures=kept, is_of_calls=True, max_open=max_open)
        assert self._engine.why_not_paired(span) is None
        with open(self._path, "rb") as file:
            parsed = parse_object(file)
            status = os.fstat(file.fileno())
        found = Object(ObjectKey(1, status.st_ino, 0, 0), str(self._path), parsed)
        of_pair = None if not of_pairs else parse(of_pairs, lambda _: None)
        actions: dict[str, Action] = {
            "entry": BeginSpan(span),
            "return": EndSpan(span, Emit((RESULT, *map(of_start, kept), ELAPSED)), of_pair),
        }
        sites = tuple(TargetSite(site, 1, actions[site.name]) for site in parsed.sites)
        self._opened += 1
        sink = SpanSink()
        self._engine.open(self._opened, sink, 8192, f"client {self._opened}", sink)
        assert self._engine.arm(self._opened, Target(found, str(self._path), sites)) == []
        return sink

    def close(self) -> None:
        for each in [self._engine.close(key) for key in range(1, self._opened + 1)]:
            each.result(PATIENCE_SECONDS)
        self._engine.retry_cleanup()
        wait_for(lambda: self._engine.metrics().table_bytes == 0, "the tables to be gone")

    @property
    def waiting(self) -> int:
        return sum(len(table.entries.all_keys()) for table in self._engine._spans.all() if table.entries)


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Calls]:
    path = compile_target("frames.c", tmp_path / "frames", "-lpthread", "-mno-red-zone")
    paging = Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    engine = BpfEngine(Tracefs.locate(), Owner.this_process(), Loaded(), paging)
    try:
        with Ticker(path) as calls:
            yield Calls(engine, path, calls)
    finally:
        engine.shutdown()


def name(depth: int, number: int) -> bytes:
    return b"call %d of %d" % (depth, number)


def test_each_return_tells_of_its_entry(traced: Calls) -> None:
    """Calls are nested deeper than the daemon would pair them."""
    depth, times, threads = 40, 50, 4
    sink = traced.trace(NAME, NUMBER, DEPTH)
    total = traced.calls.do(f"nest {depth} {times} {threads}")
    assert traced.waiting == 0
    traced.close()
    expected = Counter(
        (number if each % 2 else -1, name(each, number), number, each)
        for each in range(1, depth + 1)
        for number in range(times)
        for _ in range(threads)
    )
    assert Counter(values[:-1] for values in sink.values) == expected
    assert all(values[-1] > 0 for values in sink.values)
    assert sink.counts == SpanCounts(starts=total, paired=total)
    assert (sink.fired_count, sink.losses) == (2 * total, {})


def test_what_the_result_rules_out_leaves_the_kernel_as_a_count(traced: Calls) -> None:
    times = 5000
    failed = traced.trace(NAME, of_pairs="elapsed < 0 || arg0 == -1 && arg1 >= 4998")
    by_time = traced.trace(NUMBER, of_pairs="elapsed > 60s")
    total = traced.calls.do(f"nest 3 {times} 2")
    assert traced.waiting == 0
    traced.close()
    assert Counter(values[:2] for values in failed.values) == {(-1, name(2, 4998)): 2, (-1, name(2, 4999)): 2}
    assert by_time.values == []
    for sink in (failed, by_time):
        assert sink.counts == SpanCounts(starts=total, paired=total)
        assert sink.filtered_count == total - len(sink.values)
        assert sink.fired_count == sink.told == 2 * total


def test_starts_of_all_sizes_are_told_together(traced: Calls) -> None:
    """The record of a pair has those of several subscriptions one after the other."""
    large = Capture(0, is_string=True)
    sinks = {
        kept: traced.trace(*kept) for kept in [(NAME,), (BUFFER, NUMBER), (large, DEPTH), (NUMBER,) * 1 + (large,) * 7]
    }
    total = traced.calls.do("nest 2 50 2")
    traced.close()
    names = Counter(name(each, number) for each in (1, 2) for number in range(50) for _ in range(2))
    for kept, sink in sinks.items():
        assert sink.counts == SpanCounts(starts=total, paired=total)
        texts = [value for values in sink.values for value in values[1:-1] if isinstance(value, bytes)]
        strings = Counter(text.partition(b"\0")[0] for text in texts)
        assert strings == Counter({text: count * len(texts) // total for text, count in names.items()})
        assert (2048 in {len(text) for text in texts}) is (BUFFER in kept)


def test_what_there_is_no_room_for_is_told(traced: Calls) -> None:
    sink = traced.trace(NAME, max_open=10)
    traced.calls.do("nest 30 2 1")
    traced.close()
    assert sink.counts == SpanCounts(starts=60, paired=20, table_full=40, unmatched=40)
    assert sorted(values[1] for values in sink.values) == sorted(
        name(depth, number) for depth in range(21, 31) for number in range(2)
    )
    assert sink.fired_count == sink.told == 120


def test_calls_of_a_process_that_was_killed_are_over(traced: Calls) -> None:
    """None of them returns, and nobody is told by the kernel."""
    sink = traced.trace(NAME)
    traced.calls.begin("nest 20 1000000 8")
    wait_for(lambda: traced.waiting > 8, "calls to be in progress")
    os.kill(traced.calls.pid, signal.SIGKILL)
    wait_for(lambda: traced.waiting == 0, "calls to be over")
    traced.close()
    assert sink.counts.died > 0
    assert sink.counts.open == 0
    assert sink.fired_count == sink.told
