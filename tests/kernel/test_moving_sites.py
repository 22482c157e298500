"""Sites that move from one group to another while they are hit: by tracefs events, by links, and between the two.

Some programs are built with a delay at their beginning, so that each hit spends most of its time between two groups'
programs, where a slot that is switched at once would lose it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bpf.build import SOURCE, build
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.groups import Attachments
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import Target
from stapsdtd.capture.names import Owner
from stapsdtd.client import Client, SubscribeOptions
from stapsdtd.kernel import uprobe_links
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.attachments import EVENTS_ALONE, Choice, Means, Scope
from tests.bench.setup import Firing
from tests.kernel.test_late_hits import CountingSink, target
from tests.kernel.test_scoped_processes import tick
from tests.support import Daemon, Ticker

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

GAP_STEPS = 10_000
"""Of a bpf_loop(), some 25 us: many times of what else a hit takes."""
ROUNDS = 8

needs_links = pytest.mark.skipif(not uprobe_links.are_supported(), reason="links to uprobes are there since Linux 6.6")
CHOICES = [
    pytest.param(EVENTS_ALONE, id="events"),
    pytest.param(Choice(Means.LINK, Means.LINK), id="links", marks=needs_links),
    pytest.param(Choice(Means.LINK, Means.EVENT), id="links-and-events", marks=needs_links),
]
COUNT = 150_000


@contextmanager
def engine_with_gaps(folder: Path, choice: Choice) -> Iterator[BpfEngine]:
    built = folder / "gaps.o"
    build(built, SOURCE, f"-DGAP_STEPS={GAP_STEPS}")
    loaded, tracefs = Loaded(str(built)), Tracefs.locate()
    attachments = Attachments.of(loaded, tracefs, frozenset, choice)
    paging = Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    engine = BpfEngine(tracefs, Owner.this_process(), loaded, paging, attachments=attachments)
    try:
        yield engine
    finally:
        engine.shutdown()


def scoped(path: Path, scope: Scope) -> Target:
    made = target(path)
    (site,) = made.sites
    return made.__class__(made.object, made.file_path, (site.__class__(site.site, 1, site.action, scope),))


def fire_until(stopped: threading.Event, firing: Firing, threads: int) -> int:
    """Return how often it fired."""
    fired = 0
    while not stopped.is_set():
        fired += firing.fire(200, threads=threads).fired
    return fired


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("threads", [1, 4])
def test_hits_between_two_programs_are_not_lost(tmp_path: Path, choice: Choice, threads: int) -> None:
    with Firing(tmp_path) as firing, engine_with_gaps(tmp_path, choice) as engine, ThreadPoolExecutor(1) as background:
        sink, stopped = CountingSink(), threading.Event()
        engine.open(1, sink, 1024)
        assert engine.arm(1, scoped(firing.path, frozenset({firing.pid}))) == []
        fired = background.submit(fire_until, stopped, firing, threads)
        try:
            for number in range(ROUNDS):
                engine.open(2, CountingSink(), 64)
                assert engine.arm(2, scoped(firing.path, None)) == []
                if number % 2:
                    # else it moves on before the first group is gone
                    engine.quiesced().result(timeout=60)
                closed = engine.close(2)
                closed.result(timeout=60)
                engine.quiesced().result(timeout=60)
        finally:
            stopped.set()
        count = fired.result()
        engine.close(1).result(timeout=60)
        assert sink.fired_count == count
        assert sink.accounted == sink.fired_count


@pytest.mark.parametrize("threads", [1, 4])
def test_no_hit_is_missed_or_doubled_while_scopes_change(
    daemon: Daemon, engine: str, ticker: Ticker, ticker_program: Path, threads: int
) -> None:
    """Where perf events are allowed, some processes are patched by an event, and all of them by a link."""
    if engine != "bpf":
        pytest.skip("the ftrace engine arms files, not processes")
    selector, pids = tick(ticker_program), [ticker.pid]
    with Ticker(ticker_program) as other, Client(daemon.target) as client:
        kept = client.subscribe(selector, SubscribeOptions(pids=pids))
        ticker.begin(f"threads {threads} {COUNT // threads}")
        for _ in range(3):
            wider = client.subscribe(selector, SubscribeOptions(pids=[*pids, other.pid]))
            everybody = client.subscribe(selector)
            wider.unsubscribe()
            single = client.subscribe(selector, SubscribeOptions(pids=[other.pid]))
            everybody.unsubscribe()
            single.unsubscribe()
        ticker.finish()
        account = kept.unsubscribe()
        assert account.fired == COUNT // threads * threads
        assert ticker.semaphore == other.semaphore == 0
