"""Which rings there are, how large, and who loses what does not fit in."""

from __future__ import annotations

import errno

import pytest

from stapsdtd.capture.bpf import layout, ring_set
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


def test_ring_that_could_not_be_put_in_place_is_made_anew(
    kernel: FakeKernel, engine: BpfEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(_class: int, _ring: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.loaded, "put_ring", refusing)
        sink = opened(engine, 1)
        assert "no memory" in refused(engine.arm(1, target(kernel, A)))[A.name]
    assert engine.arm(1, target(kernel, A)) == []
    kernel.hit(A.site_offset, rdi=5)
    closed(engine, 1)
    assert (sink.values, sink.losses) == ([(1, 5)], {})


def test_ring_is_read_as_soon_as_hits_write_to_it(
    kernel: FakeKernel, engine: BpfEngine, sink: RecordingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes a while to return from putting one in place, and a plan may end meanwhile."""
    engine.arm(1, target(kernel, A))
    (goes_on,) = kernel.begin_hits(A.site_offset, rdi=5)
    ended = engine.close(1)
    put_ring = kernel.loaded.put_ring

    def put_amid_hits(record_class: int, ring: int) -> None:
        put_ring(record_class, ring)
        goes_on()
        ended.result(PATIENCE_SECONDS)

    monkeypatch.setattr(kernel.loaded, "put_ring", put_amid_hits)
    opened(engine, 2, 1024)
    assert (sink.values, sink.told) == ([(1, 5)], (1, 1, 0, {}))


def test_large_rings_go_with_the_last_subscription(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_set, "_KEPT_BYTES", 64 * 1024)
    engine = made_engine(kernel)
    for kib in (4, 64, 256):
        opened(engine, kib, kib)
        engine.arm(kib, target(kernel, A))
    for kib in (4, 64, 256):
        assert kernel.loaded.rings
        closed(engine, kib)
    assert kernel.loaded.rings == {}
    assert [ring.size // 1024 // len(online_cpus()) for ring in kernel.loaded.made] == [4, 64, 256]
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
    before = free(engine)
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
    sink = opened(engine, 1, 1)
    engine.arm(1, target(kernel, A))
    (ring,) = kernel.loaded.made
    fired = 2 * ring.size // ring.stride

    def hit() -> None:
        for number in range(fired):
            kernel.hit(A.site_offset, rdi=number, cpu=number % 2)

    # while it is busy with this, nothing is read
    engine._reader._jobs.call(hit)
    closed(engine, 1)
    assert sink.values == [(1, number) for number in range(ring.size // ring.stride)]
    assert sink.losses == {LossStage.KERNEL_BUFFER: fired - len(sink.values)}


def test_who_writes_little_is_not_lost_to_who_fills_the_ring(kernel: FakeKernel, engine: BpfEngine) -> None:
    kernel.loaded.share = 5
    sink = opened(engine, 1, 1)
    engine.arm(1, target(kernel, A))
    (ring,) = kernel.loaded.made
    room = ring.size // ring.stride

    def hit() -> None:
        for number in range(2 * room):
            kernel.hit(A.site_offset, rdi=number, pid=7)
        for number in range(3):
            kernel.hit(A.site_offset, rdi=100_000 + number, pid=8)

    engine._reader._jobs.call(hit)
    closed(engine, 1)
    assert [value for _, value in sink.values] == [*range(room + 5), *range(100_000, 100_003)]
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
