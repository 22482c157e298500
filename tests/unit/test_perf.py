from __future__ import annotations

import io
import os
import struct
from typing import Any, cast

import pytest

from stapsdtd.kernel import perf
from stapsdtd.kernel.perf import Lost, Mapped, MappingRing, online_cpus

DATA_BYTES = perf._PAGE * perf._DATA_PAGES
MMAP2, LOST, COMM = 10, 2, 3


def record(kind: int, pid: int = 0, size: int = 112) -> bytes:
    return struct.pack("=IHHI", kind, 0, size, pid).ljust(size, b"\0")


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
    assert list(ring.reader.read()) == []
    ring.put(record(MMAP2, 10), record(COMM, 11, 40), record(LOST, size=24), record(MMAP2, 12, 128))
    assert list(ring.reader.read()) == [Mapped(10), Lost(), Mapped(12)]
    assert ring.tail == ring.head
    assert list(ring.reader.read()) == []


@pytest.mark.parametrize("before_the_end", range(8, 136, 8))
def test_records_that_wrap_around(before_the_end: int) -> None:
    ring = Ring(5 * DATA_BYTES - before_the_end)
    ring.put(record(MMAP2, 10), record(MMAP2, 11, 120))
    assert list(ring.reader.read()) == [Mapped(10), Mapped(11)]
    assert ring.tail == ring.head


def test_online_cpus() -> None:
    assert set(os.sched_getaffinity(0)) <= set(online_cpus())


@pytest.mark.parametrize(("text", "cpus"), [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0-1,4,6-7\n", [0, 1, 4, 6, 7])])
def test_list_of_cpus(text: str, cpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "open", lambda _path, **_options: io.StringIO(text), raising=False)
    assert online_cpus() == cpus
