"""Calls that led to each other, told apart in the kernel.

The calls are of a program's functions that have probes where the kernel's own are attached to.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import LossStage, Refusal, Target, TargetSite
from stapsdtd.capture.names import Owner
from stapsdtd.elf import parse_object
from stapsdtd.events.batch import EventBatch
from stapsdtd.functions.chain import Link, LinkKind
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Capture, Object, ObjectKey
from stapsdtd.query.actions import Emit
from stapsdtd.query.parse import parse
from tests.kernel.test_kernel_spans import SpanSink
from tests.support import Ticker, compile_target, wait_for
from tests.unit.samples import event_rows

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

PATIENCE_SECONDS = 60
ENTRY, RETURN = 1, 2
"""Ids of sites."""

WANTED = [("abc", "", ""), ("ba", "", "d"), ("abcd", "arg1 == 1", ""), ("c", "arg1 > 0", "ab")]
"""Chains, what hits have to satisfy, and functions that are wanted within the chain."""

Event = tuple[int, int]
"""The id of a site, and the place in the script where the call was entered."""


class EventSink(SpanSink):
    def deliver(self, batch: EventBatch) -> None:
        self.values += [row[5:] for row in event_rows(batch)]


class Chained:
    """An engine that traces a running tests/targets/chains.c."""

    def __init__(self, engine: BpfEngine, path: Path, calls: Ticker) -> None:
        self._engine = engine
        self._path = path
        self._opened = 0
        self._ended: set[int] = set()
        self.calls = calls

    def trace(self, chain: str, *, where: str = "", others: str = "", owner: str = "") -> EventSink:
        """where: what hits have to satisfy. others: functions that are wanted within the chain."""
        sink = self._open(owner)
        assert self._arm(chain, where, others) == []
        return sink

    def begin(self, functions: str) -> int:
        """Trace functions for another subscription. Return its key."""
        self.trace(functions)
        return self._opened

    def end(self, key: int) -> None:
        self._engine.close(key).result(PATIENCE_SECONDS)
        self._ended.add(key)

    def refused(self, chain: str, owner: str) -> list[Refusal]:
        self._open(owner)
        return self._arm(chain)

    def _open(self, owner: str) -> EventSink:
        self._opened += 1
        sink = EventSink()
        self._engine.open(self._opened, sink, 8192, owner or f"client {self._opened}", sink)
        return sink

    def _arm(self, chain: str, where: str = "", others: str = "") -> list[Refusal]:
        with open(self._path, "rb") as file:
            parsed = parse_object(file)
            status = os.fstat(file.fileno())
        found = Object(ObjectKey(1, status.st_ino, 0, 0), str(self._path), parsed)
        predicate = parse(where, lambda _: None) if where else None
        action = Emit((Capture(0),))
        sites = []
        for site in parsed.sites:
            function, _, end = site.name.partition("__")
            link = Link(LinkKind.WITHIN, len(chain) - 1)
            if function in chain:
                kind = LinkKind.ENTERED if end == "entry" else LinkKind.RETURNED
                link = Link(kind, chain.index(function))
            if function in chain + others:
                sites.append(TargetSite(site, ENTRY if end == "entry" else RETURN, action, None, predicate, link))
        return self._engine.arm(self._opened, Target(found, str(self._path), tuple(sites)))

    def close(self) -> None:
        keys = set(range(1, self._opened + 1)) - self._ended
        for each in [self._engine.close(key) for key in keys]:
            each.result(PATIENCE_SECONDS)
        self._opened = 0
        self._ended.clear()
        self._engine.retry_cleanup()
        wait_for(lambda: self._engine.metrics().table_bytes == 0, "the tables to be gone")

    @property
    def threads(self) -> int:
        """How many threads have calls on a chain."""
        return sum(len(chain.threads.all_keys()) for chain in self._engine._chains._of.values())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chains") / "chains"
    return compile_target("chains.c", path, "-lpthread", "-mno-red-zone")


@pytest.fixture
def traced(program: Path) -> Iterator[Chained]:
    paging = Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    engine = BpfEngine(Tracefs.locate(), Owner.this_process(), Loaded(), paging)
    try:
        with Ticker(program) as calls:
            yield Chained(engine, program, calls)
    finally:
        engine.shutdown()


def expected(script: str, chain: str, *, is_tested: bool = False, others: str = "") -> list[Event]:
    """What is delivered of a script. is_tested: only entries and returns are wanted that tell 1."""
    events: list[Event] = []
    calls: list[tuple[str, int]] = []
    links: list[int] = []
    for place, what in enumerate(script):
        is_wanted = not is_tested or what in "abcd-"
        if what not in "-!":
            function = what.lower()
            calls.append((function, place))
            if len(links) < len(chain) and chain[len(links)] == function and is_wanted:
                links.append(place)
                events.append((ENTRY, place))
            elif function in others and len(links) == len(chain) and is_wanted:
                events.append((ENTRY, place))
            continue
        function, entered = calls.pop()
        is_told = entered in links or (function in others and len(links) == len(chain))
        if entered in links:
            links.remove(entered)
        if is_told and is_wanted:
            events.append((RETURN, entered))
    return events


def script_of(seed: int, *, most_deep: int = 12) -> str:
    chosen, script, depth = random.Random(seed), "", 0
    for _ in range(300):
        if depth and (depth >= most_deep or chosen.random() < 0.5):
            script += chosen.choice("--!")
            depth -= 1
        else:
            script += chosen.choice("aabbbcccddABC")
            depth += 1
    return script + "-" * depth


def hits(script: str, functions: str) -> int:
    calls: list[str] = []
    count = 0
    for what in script:
        function = calls.pop() if what in "-!" else what.lower()
        if what not in "-!":
            calls.append(function)
        count += function in functions
    return count


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.vm) for seed in (4, 5))])
def test_calls_as_they_led_to_each_other(traced: Chained, seed: int) -> None:
    times, threads, script = 20, 4, script_of(seed)
    sinks = {
        (chain, where, others): traced.trace(chain, where=where, others=others)
        for chain, where, others in [
            ("abc", "", ""),
            ("ba", "", "d"),
            ("abcd", "arg1 == 1", ""),
            ("c", "arg1 > 0", "ab"),
        ]
    }
    traced.calls.do(f"run {script} {times} {threads}")
    assert traced.threads == 0
    traced.close()
    for (chain, where, others), sink in sinks.items():
        once = expected(script, chain, is_tested=bool(where), others=others)
        assert Counter(sink.values) == Counter(once * times * threads)
        assert sink.fired_count == sink.told == hits(script, chain + others) * times * threads
        assert not sink.losses


def test_events_of_a_thread_are_in_order(traced: Chained) -> None:
    script = script_of(7)
    sink = traced.trace("abc")
    traced.calls.do(f"run {script} 3 1")
    traced.close()
    assert sink.values == expected(script, "abc") * 3


@pytest.mark.vm
def test_depth_makes_no_difference(traced: Chained) -> None:
    script = "a" + "da" * 500 + "b" + "db" * 400 + "c" + "-" * 1803
    sink = traced.trace("abc")
    traced.calls.do(f"run {script} 2 4")
    traced.close()
    assert Counter(sink.values) == Counter(expected(script, "abc") * 8)
    assert len(expected(script, "abc")) == 6


def test_a_function_that_is_called_in_the_place_of_a_return(traced: Chained) -> None:
    sink = traced.trace("abc")
    traced.calls.do("run tc--tc--a- 5 2")
    assert traced.threads == 0
    traced.close()
    once = [
        *((ENTRY, 0), (ENTRY, 0), (ENTRY, 1), (RETURN, 1), (RETURN, 0), (RETURN, 0)),
        *((ENTRY, 4), (ENTRY, 4), (ENTRY, 5), (RETURN, 5), (RETURN, 4), (RETURN, 4), (ENTRY, 8), (RETURN, 8)),
    ]
    assert Counter(sink.values) == Counter(once * 10)


@pytest.mark.vm
def test_a_call_whose_return_was_missed_is_over_with_the_next_one_beside_it(traced: Chained) -> None:
    sink = traced.trace("ab")
    # what comes behind m is called from where it was
    traced.calls.do("run m-am-b-- 4 1")
    traced.close()
    assert sink.values[:2] == [(ENTRY, 0), (ENTRY, 2)]
    assert sink.values[2:6] == [(ENTRY, 5), (RETURN, 5), (RETURN, 2), (ENTRY, 0)]
    assert traced.threads == 0


@pytest.mark.vm
def test_threads_that_end_in_a_call_leave_nothing(traced: Chained) -> None:
    sink = traced.trace("ab")
    for _ in range(3):
        traced.calls.do("run abx 1 16")
    wait_for(lambda: traced.threads == 0, "the kernel to free the threads")
    traced.close()
    assert Counter(sink.values) == {(ENTRY, 0): 48, (ENTRY, 1): 48}


def test_threads_for_which_there_is_no_room_are_told_as_lost(traced: Chained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_CHAINED", 4)
    sink = traced.trace("ab")
    traced.calls.do("run abw-- 1 16")
    traced.close()
    entered = Counter(sink.values)[ENTRY, 0]
    assert 4 <= entered < 16
    assert Counter(sink.values) == dict.fromkeys([(ENTRY, 0), (ENTRY, 1), (RETURN, 1), (RETURN, 0)], entered)
    assert sink.losses == {LossStage.KERNEL_BUFFER: 16 - entered}
    assert sink.fired_count == sink.told == 64


def test_others_come_and_go_meanwhile(traced: Chained) -> None:
    """A site that moves to another attachment may miss a hit. What that leaves is over with the calls it was of."""
    script = script_of(8)
    sink = traced.trace("abc")
    for others in ("abcd", "bd", "d", "ab"):
        traced.calls.begin(f"run {script} 300 4")
        key = traced.begin(others)
        traced.end(key)
        traced.calls.finish()
    seen = len(sink.values)
    traced.calls.do(f"run {script} 20 4")
    assert traced.threads == 0
    traced.close()
    once = expected(script, "abc")
    assert Counter(sink.values[-len(once) * 80 :]) == Counter(once * 80)
    assert len(sink.values) >= seen > 0
    assert sink.fired_count == sink.told


def test_places_are_used_again_and_shared(traced: Chained) -> None:
    for _ in range(3):
        for _ in range(layout.MAX_CHAINS // 4):
            traced.trace("ab", owner="user 1000")
        refused = traced.refused("ab", owner="user 1000")
        assert {each.reason for each in refused} == {
            "user 1000 trace calls that led to each other 16 times, which is the limit"
        }
        assert len(refused) == 8
        sink = traced.trace("ab", owner="user 1001")
        traced.calls.do("run ab-- 5 1")
        traced.close()
        assert len(sink.values) == 20
