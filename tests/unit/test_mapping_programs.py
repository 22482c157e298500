"""What a BPF program writes of executable mappings, and the ring that it writes to."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from stapsdtd.kernel.mapping_programs import RecordRing, mapped
from stapsdtd.kernel.perf import Mapped

PAGE, SIZE = mmap.PAGESIZE, 4 * mmap.PAGESIZE
BUSY, DISCARDED = 1 << 31, 1 << 30


def record(*names: bytes) -> bytes:
    head = struct.pack("=QQQQII", 0x7F0000001000, 0x3000, 2, 77, 254 << 20 | 3, 42)
    return head + b"".join(name + b"\0" for name in reversed(names))


@pytest.mark.parametrize(
    ("names", "path"),
    [
        ([], ""),
        ([b"usr", b"bin", b"ls"], "/usr/bin/ls"),
        ([b"with space", b"\xff"], "/with space/\\xff"),
    ],
)
def test_record(names: list[bytes], path: str) -> None:
    assert mapped(record(*names)) == Mapped(42, os.makedev(254, 3), 77, path, 0x7F0000001000, 0x3000, 2 * PAGE)


class Writer:
    """As the kernel: a file in memory, whose data only pretends to be mapped twice in a row."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ring")
        os.ftruncate(self.descriptor, 2 * PAGE + 2 * SIZE)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._produced = 0

    def put(self, data: bytes, flags: int = 0) -> int:
        """Return where the record's head is."""
        at = self._produced % SIZE
        whole = struct.pack("=II", len(data) | flags, 0) + data
        for begin in (2 * PAGE + at, 2 * PAGE + (at + SIZE) % (2 * SIZE)):
            part = whole[: 2 * PAGE + 2 * SIZE - begin]
            self._memory[begin : begin + len(part)] = part
        wrapped = at + len(whole) - SIZE
        if wrapped > 0:
            self._memory[2 * PAGE : 2 * PAGE + wrapped] = whole[-wrapped:]
        self._produced += (len(whole) + 7) // 8 * 8
        struct.pack_into("=Q", self._memory, PAGE, self._produced)
        return 2 * PAGE + at

    def complete(self, head: int) -> None:
        (length,) = struct.unpack_from("=I", self._memory, head)
        struct.pack_into("=I", self._memory, head, length & ~BUSY)

    @property
    def consumed(self) -> int:
        return int(struct.unpack_from("=Q", self._memory)[0])

    @property
    def produced(self) -> int:
        return self._produced


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    os.close(made.descriptor)


def test_records_of_any_size_are_taken_once(writer: Writer) -> None:
    ring = RecordRing(writer.descriptor, SIZE)
    for round_ in range(40):
        data = [bytes([round_]) * size for size in (1, 48, 500, 1071)]
        for each in data:
            writer.put(each)
        assert list(ring.take()) == data
        assert writer.consumed == writer.produced
        assert list(ring.take()) == []
    assert writer.produced > 2 * SIZE
    ring.close()


def test_what_is_still_written_waits_and_what_was_given_up_is_left_out(writer: Writer) -> None:
    ring = RecordRing(writer.descriptor, SIZE)
    writer.put(b"first")
    writer.put(b"given up", DISCARDED)
    head = writer.put(b"busy", BUSY)
    writer.put(b"last")
    assert list(ring.take()) == [b"first"]
    writer.complete(head)
    assert list(ring.take()) == [b"busy", b"last"]
    ring.close()
