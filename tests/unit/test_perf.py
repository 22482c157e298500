from __future__ import annotations

import mmap
import os
import struct

import pytest

from stapsdtd.kernel.perf import Lost, Mapped, RingBuffer, mapping_records, online_cpus, parse_cpus
from stapsdtd.model import FileOffset, Mapping

DATA_BYTES = 64 * mmap.PAGESIZE
HEAD_AT, TAIL_AT = 1024, 1032
"""In struct perf_event_mmap_page."""
MMAP2, LOST, COMM = 10, 2, 3


def record(kind: int, pid: int = 0, size: int = 112, *, inode: int = 77, path: bytes = b"/usr/bin/app") -> bytes:
    body = struct.pack("=IIQQQIIQQII", pid, pid + 1, 0x7000, 0x2000, 0x1000, 0x103, 0x1F, inode, 5, 5, 2) + path
    return (struct.pack("=IHH", kind, 0, size) + body)[:size].ljust(size, b"\0")


def mapped(pid: int, path: str = "/usr/bin/app") -> Mapped:
    return Mapped(pid, os.makedev(0x103, 0x1F), 77, path, 0x7000, 0x2000, 0x1000)


class Ring:
    """What the kernel shares with a reader: positions that only grow, and data that wraps around."""

    def __init__(self, position: int = 0) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE + DATA_BYTES)
        self.head = position
        struct.pack_into("=QQ", self.memory, HEAD_AT, position, position)
        self._reader = RingBuffer(self.memory)

    def put(self, *records: bytes) -> None:
        for byte in b"".join(records):
            self.memory[mmap.PAGESIZE + self.head % DATA_BYTES] = byte
            self.head += 1
        struct.pack_into("=Q", self.memory, HEAD_AT, self.head)

    def read(self) -> list[Mapped | Lost]:
        return mapping_records(self._reader.take())

    @property
    def tail(self) -> int:
        return int(struct.unpack_from("=Q", self.memory, TAIL_AT)[0])


def test_records() -> None:
    ring = Ring()
    assert ring.read() == []
    ring.put(record(MMAP2, 10), record(COMM, 11, 40), record(LOST, size=24), record(MMAP2, 12, 128))
    assert ring.read() == [mapped(10), Lost(), mapped(12)]
    assert ring.tail == ring.head
    assert ring.read() == []


def test_record_is_a_mapping_as_maps_would_show_it() -> None:
    ring = Ring()
    ring.put(record(MMAP2, 10, path=b"/memfd:caf\xe9 (deleted)"))
    (found,) = ring.read()
    assert isinstance(found, Mapped)
    assert found.mapping == Mapping(0x7000, 0x9000, FileOffset(0x1000), os.makedev(0x103, 0x1F), 77, r"/memfd:caf\xe9")


def test_memory_without_a_file_is_left_out() -> None:
    ring = Ring()
    ring.put(record(MMAP2, 10, inode=0, path=b"//anon"), record(MMAP2, 11))
    assert ring.read() == [mapped(11)]


@pytest.mark.parametrize("before_the_end", range(8, 136, 8))
def test_records_that_wrap_around(before_the_end: int) -> None:
    ring = Ring(5 * DATA_BYTES - before_the_end)
    ring.put(record(MMAP2, 10), record(MMAP2, 11, 120))
    assert ring.read() == [mapped(10), mapped(11)]
    assert ring.tail == ring.head


def test_online_cpus() -> None:
    assert set(os.sched_getaffinity(0)) <= set(online_cpus())


@pytest.mark.parametrize(("text", "cpus"), [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0-1,4,6-7\n", [0, 1, 4, 6, 7])])
def test_list_of_cpus(text: str, cpus: list[int]) -> None:
    assert parse_cpus(text) == cpus
