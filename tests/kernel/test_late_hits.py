"""Hits that are held up for long while plans come and go: their records are the right subscription's, or nobody's.

The program is built with a delay between the decision whom a hit is for and its record.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bpf.build import SOURCE, build
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.kernel import Loaded
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import LossStage, Target, TargetSite
from stapsdtd.capture.names import Owner
from stapsdtd.elf import parse_object
from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.model import Capture, Object, ObjectKey
from stapsdtd.query.actions import Emit
from stapsdtd.spans.span import SpanCounts
from tests.bench.setup import Firing

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(240)]

ROUNDS = 1000
DELAY_STEPS = 400_000
"""Of a bpf_loop(), some 1 ms."""


class CountingSink:
    """pids: how many events came from each process."""

    def __init__(self) -> None:
        self.pids: Counter[int] = Counter()
        self.fired_count = self.filtered_count = 0
        self.losses: Counter[LossStage] = Counter()

    def deliver(self, batch: EventBatch) -> None:
        self.pids.update(batch.pid.tolist())

    def fired(self, count: int) -> None:
        self.fired_count += count

    def filtered(self, count: int, undecided: int = 0) -> None:
        del undecided
        self.filtered_count += count

    def spanned(self, counts: SpanCounts) -> None:
        del counts

    def lost(self, stage: LossStage, count: int) -> None:
        self.losses[stage] += count

    @property
    def accounted(self) -> int:
        return self.pids.total() + self.filtered_count + self.losses.total()


def target(path: Path) -> Target:
    with open(path, "rb") as file:
        parsed = parse_object(file)
        status = os.fstat(file.fileno())
    key = ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    (site,) = parsed.sites
    wanted = TargetSite(site, 1, Emit((Capture(0), Capture(1), Capture(2))))
    return Target(Object(key, str(path), parsed), str(path), (wanted,))


@contextmanager
def slow_engine(folder: Path) -> Iterator[BpfEngine]:
    built = folder / "slow.o"
    build(built, SOURCE, f"-DDELAY_STEPS={DELAY_STEPS}")
    paging = Paging(lambda *_: None, lambda _: 0, lambda *_: 0)
    engine = BpfEngine(Tracefs.locate(), Owner.this_process(), Loaded(str(built)), paging)
    try:
        yield engine
    finally:
        engine.shutdown()


def test_no_record_reaches_a_later_subscription(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with Firing(folders[0]) as one, Firing(folders[1]) as two, slow_engine(tmp_path) as engine:
        # it keeps both sites armed, so that all that changes is by which plan hits go
        always = CountingSink()
        engine.open(1, always, 64)
        targets = [target(firing.path) for firing in (one, two)]
        for each in targets:
            assert engine.arm(1, each) == []
        for firing in (one, two):
            firing.begin(seconds=600)
        ended = []
        for number in range(ROUNDS):
            sinks = CountingSink(), CountingSink()
            for subscription_key, sink, wanted in zip((2 * number + 2, 2 * number + 3), sinks, targets, strict=True):
                engine.open(subscription_key, sink, 64)
                assert engine.arm(subscription_key, wanted) == []
            closed = [engine.close(subscription_key) for subscription_key in (2 * number + 2, 2 * number + 3)]
            ended.append((sinks, closed))
        for sinks, closed in ended:
            for sink, done, firing in zip(sinks, closed, (one, two), strict=True):
                done.result(timeout=30)
                assert set(sink.pids) <= {firing.pid}
                assert sink.fired_count == sink.accounted
        engine.close(1).result(timeout=30)
        assert set(always.pids) == {one.pid, two.pid}
        assert always.fired_count == always.accounted
        assert always.losses[LossStage.DECODE] == 0
        assert engine.metrics().strays == 0
        # the test would show nothing if hits were over before plans went
        assert sum(sink.pids.total() for sinks, _ in ended for sink in sinks) > 0
