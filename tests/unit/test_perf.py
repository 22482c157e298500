from __future__ import annotations

import io
import os
import struct
from typing import Any, cast

import pytest

from stapsdtd.kernel import perf
from stapsdtd.kernel.perf import Lost, Mapped, MappingRing, online_cpus
from stapsdtd.model import FileOffset, Mapping

DATA_BYTES = perf._PAGE * perf._DATA_PAGES
MMAP2, LOST, COMM = 10, 2, 3


def record(kind: int, pid: int = 0, size: int = 112, *, inode: int = 77, path: bytes = b"/usr/bin/app") -> bytes:
    body = struct.pack("=IIQQQIIQQII", pid, pid + 1, 0x7000, 0x2000, 0x1000, 0x103, 0x1F, inode, 5, 5, 2) + path
    return (struct.pack("=IHH", kind, 0, size) + body)[:size].ljust(size, b"\0")


def mapped(pid: int, path: str = "/usr/bin/app") -> Mapped:
    return Mapped(pid, os.makedev(0x103, 0x1F), 77, path, 0x7000, 0x2000, 0x1000)


class Ring:
    """What the kernel shares with a reader: positions that only grow, and data that wraps around."""

    def __init__(self, position: int = 0) -> None:
        self.memory = bytearray(perf._PAGE + DATA_BYTES)
        self.head = position
        struct.pack_into("=QQ", self.memory, perf._HEAD_AT, position, position)
        self.reader = MappingRing.__new__(MappingRing)
        self.reader._ring = cast("Any", self.memory)

    def put(self, *records: bytes) -> None:
        for byte in b"".join(records):
            self.memory[perf._PAGE + self.head % DATA_BYTES] = byte
            self.head += 1
        struct.pack_into("=Q", self.memory, perf._HEAD_AT, self.head)

    @property
    def tail(self) -> int:
        return int(struct.unpack_from("=Q", self.memory, perf._TAIL_AT)[0])


def test_records() -> None:
    ring = Ring()
    assert ring.reader.read() == []
    ring.put(record(MMAP2, 10), record(COMM, 11, 40), record(LOST, size=24), record(MMAP2, 12, 128))
    assert ring.reader.read() == [mapped(10), Lost(), mapped(12)]
    assert ring.tail == ring.head
    assert ring.reader.read() == []


def test_record_is_a_mapping_as_maps_would_show_it() -> None:
    ring = Ring()
    ring.put(record(MMAP2, 10, path=b"/memfd:caf\xe9 (deleted)"))
    (found,) = ring.reader.read()
    assert isinstance(found, Mapped)
    assert found.mapping == Mapping(0x7000, 0x9000, FileOffset(0x1000), os.makedev(0x103, 0x1F), 77, r"/memfd:caf\xe9")


def test_memory_without_a_file_is_left_out() -> None:
    ring = Ring()
    ring.put(record(MMAP2, 10, inode=0, path=b"//anon"), record(MMAP2, 11))
    assert ring.reader.read() == [mapped(11)]


@pytest.mark.parametrize("before_the_end", range(8, 136, 8))
def test_records_that_wrap_around(before_the_end: int) -> None:
    ring = Ring(5 * DATA_BYTES - before_the_end)
    ring.put(record(MMAP2, 10), record(MMAP2, 11, 120))
    assert ring.reader.read() == [mapped(10), mapped(11)]
    assert ring.tail == ring.head


def test_online_cpus() -> None:
    assert set(os.sched_getaffinity(0)) <= set(online_cpus())


@pytest.mark.parametrize(("text", "cpus"), [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0-1,4,6-7\n", [0, 1, 4, 6, 7])])
def test_list_of_cpus(text: str, cpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "open", lambda _path, **_options: io.StringIO(text), raising=False)
    assert online_cpus() == cpus
