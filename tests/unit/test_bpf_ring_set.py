"""Which rings there are, how large, and who loses what does not fit in."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.engine import LossStage
from stapsdtd.kernel.perf import online_cpus
from stapsdtd.model import Capture
from tests.support import wait_for
from tests.unit.bpf_rig import (
    A,
    closed,
    free,
    made_engine,
    nothing_is_left,
    opened,
    quiesced,
    refused,
    taking,
    target,
    wide,
)
from tests.unit.fake_bpf import PATIENCE_SECONDS, FakeKernel, RecordingSink
from tests.unit.samples import sample_object

pytestmark = pytest.mark.timeout(60)


class HoldingSink(RecordingSink):
    """Holds up the reader with its first event for as long as a test likes, so that nothing is read meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._has_event = threading.Event()
        self._goes_on = threading.Event()
        self.before_delivery = self._wait

    def _wait(self) -> None:
        self._has_event.set()
        assert self._goes_on.wait(PATIENCE_SECONDS)

    @contextmanager
    def held(self, hit: Callable[[], None]) -> Iterator[None]:
        hit()
        assert self._has_event.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            self._goes_on.set()


def test_ring_that_could_not_be_put_in_place_is_made_anew(kernel: FakeKernel, engine: BpfEngine) -> None:
    kernel.loaded.refuse_puts = OSError(errno.ENOMEM, "no memory")
    sink = opened(engine, 1)
    assert "no memory" in refused(engine.arm(1, target(kernel, A)))[A.name]
    kernel.loaded.refuse_puts = None
    assert engine.arm(1, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=5)
    closed(engine, 1)
    assert (sink.values, sink.losses) == ([(1, 5)], {})


def test_ring_is_read_as_soon_as_hits_write_to_it(kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink) -> None:
    """The kernel takes a while to return from putting one in place, and a plan may end meanwhile."""
    engine.arm(1, target(kernel, A))
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    ended = engine.close(1)

    def hit_ends() -> None:
        goes_on()
        ended.result(PATIENCE_SECONDS)

    kernel.loaded.after_put = hit_ends
    opened(engine, 2, 1024)
    assert (sink.values, sink.told) == ([(1, 5)], (1, 1, 0, {}))


def test_large_rings_go_with_the_last_subscription(kernel: FakeKernel) -> None:
    engine = made_engine(kernel)
    large = 32 << 10
    for kib in (4, 64, large):
        opened(engine, kib, kib)
        engine.arm(kib, target(kernel, A))
    for kib in (4, 64, large):
        assert kernel.loaded.rings
        closed(engine, kib)
    assert kernel.loaded.rings == {}
    assert [ring.size // 1024 // len(online_cpus()) for ring in kernel.loaded.made] == [4, 64, large]
    wait_for(lambda: all(ring.is_closed for ring in kernel.loaded.made), "the rings to be closed")
    opened(engine, 1, 4)
    engine.arm(1, target(kernel, A))
    closed(engine, 1)
    assert [ring.is_closed for ring in kernel.loaded.made] == [True, True, True, False]
    engine.shutdown()
    assert kernel.loaded.made[-1].is_closed


def test_ring_that_cannot_be_made_is_a_refusal(kernel: FakeKernel, engine: BpfEngine) -> None:
    kernel.loaded.refuse_rings = OSError(errno.ENOMEM, "Cannot allocate memory")
    opened(engine, 1)
    before = free(kernel, engine)
    assert refused(engine.arm(1, target(kernel, A))) == {"a": "[Errno 12] Cannot allocate memory"}
    nothing_is_left(engine, kernel, before)
    kernel.loaded.refuse_rings = None
    assert engine.arm(1, target(kernel, A)) == []


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
    engine.open(1, sink := HoldingSink(), 1)
    engine.arm(1, target(kernel, A))
    (ring,) = kernel.loaded.made
    fired = 2 * ring.size // ring.stride
    with sink.held(lambda: kernel.hit(A.site_offset, rdi=fired)):
        for number in range(fired):
            kernel.hit(A.site_offset, rdi=number, cpu=number % 2)
    closed(engine, 1)
    assert sink.values == [(1, fired), *((1, number) for number in range(ring.size // ring.stride))]
    assert sink.losses == {LossStage.KERNEL_BUFFER: 1 + fired - len(sink.values)}


def test_who_writes_little_is_not_lost_to_who_fills_the_ring(kernel: FakeKernel, engine: BpfEngine) -> None:
    kernel.loaded.share = 5
    engine.open(1, sink := HoldingSink(), 1)
    engine.arm(1, target(kernel, A))
    (ring,) = kernel.loaded.made
    room = ring.size // ring.stride
    with sink.held(lambda: kernel.hit(A.site_offset, rdi=99_999, pid=7)):
        for number in range(2 * room):
            kernel.hit(A.site_offset, rdi=number, pid=7)
        for number in range(3):
            kernel.hit(A.site_offset, rdi=100_000 + number, pid=8)
    closed(engine, 1)
    assert [value for _, value in sink.values] == [99_999, *range(room + 5), *range(100_000, 100_003)]
    assert sink.losses == {LossStage.KERNEL_BUFFER: room - 5}


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
