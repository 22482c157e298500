"""Sites that move from one group to another, and on before the first is gone."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable

import numpy as np
import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.moves import Moves
from stapsdtd.capture.bpf.pool import Pool
from stapsdtd.capture.bpf.slots import Slots, Word
from tests.unit.bpf_rig import FOUND, A, B, Traffic, closed, free, nothing_is_left, opened, quiesced, target
from tests.unit.fake_bpf import FakeKernel, RecordingSink

pytestmark = pytest.mark.timeout(60)


class Host:
    """waits: how many grace periods began. during_wait: is called in each, and may raise."""

    def __init__(self) -> None:
        self._words = np.frombuffer(mmap.mmap(-1, 8 * layout.MAX_SLOTS), "u8")
        self.slots = Slots(self._words, Pool("sites", layout.MAX_SLOTS, 1))
        self.moves = Moves(self.slots)
        self.waits = 0
        self.during_wait: Callable[[], None] = lambda: None

    def wait(self) -> None:
        self.waits += 1
        self.during_wait()

    def moving(self, older: int, newer: int) -> int:
        slot = self.slots.allocate()
        self.slots.set(slot, older, plan=1)
        self.slots.admit(slot, newer)
        return slot

    def groups(self, slot: int) -> tuple[int, int]:
        """The newest and the oldest."""
        return Word.unpack(int(self._words[slot]))[:2]


@pytest.fixture
def host() -> Host:
    return Host()


def test_older_group_counts_until_the_grace_period_is_over(host: Host) -> None:
    slot = host.moving(1, 2)
    host.moves.begin(1, [slot], host.wait)
    seen = []
    host.during_wait = lambda: seen.append(host.groups(slot))
    host.moves.end(1)
    assert (seen, host.groups(slot)) == ([(2, 1)], (2, 2))


def test_moves_share_a_grace_period(host: Host) -> None:
    first, second = host.moving(1, 2), host.moving(3, 4)
    host.moves.begin(1, [first], host.wait)
    host.moves.begin(3, [second], host.wait)
    for group in (3, 1, 5):
        host.moves.end(group)
    assert (host.waits, host.groups(first), host.groups(second)) == (1, (2, 2), (4, 4))


def test_move_that_begins_during_a_grace_period_has_one_of_its_own(host: Host) -> None:
    first, second = host.moving(1, 2), host.moving(3, 4)
    host.moves.begin(1, [first], host.wait)
    host.during_wait = lambda: host.moves.begin(3, [second], host.wait)
    host.moves.end(1)
    assert (host.groups(first), host.groups(second)) == ((2, 2), (4, 3))
    host.during_wait = lambda: None
    host.moves.end(3)
    assert (host.waits, host.groups(second)) == (2, (4, 4))


def test_move_ends_without_a_grace_period_and_says_what_that_costs(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    slot = host.moving(1, 2)

    def refuse() -> None:
        raise OSError(errno.ENOMEM, "no memory")

    host.during_wait = refuse
    host.moves.begin(1, [slot], host.wait)
    host.moves.end(1)
    assert host.groups(slot) == (2, 2)
    (message,) = caplog.messages
    assert "hits of sites that moved may be lost" in message
    assert "no memory" in message


@pytest.mark.parametrize("hits_before", [0, 1])
def test_no_hit_is_missed_or_doubled_by_a_site_that_moves_on(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, hits_before: int
) -> None:
    """hits_before: which of the hits have run a program when a step comes."""
    opened(engine, 2)
    before = free(kernel, engine)
    engine.arm(1, target(kernel, A, B, pids={10}))
    kernel.reaper_worker.is_held = True
    traffic = Traffic(kernel, (A, 10))
    for _ in range(hits_before):
        traffic.fire()
    for _ in range(2):
        engine.arm(2, target(kernel, A))
        engine.disarm(2, FOUND)
    assert len(kernel.events) > 2
    traffic.fire()
    kernel.reaper_worker.release()
    traffic.fire()
    quiesced(engine)
    assert [values[1] for values in sink.values] == list(range(traffic.fired))
    closed(engine, 1)
    closed(engine, 2)
    nothing_is_left(engine, kernel, before)
