"""Executable mappings of files, reported by a BPF program where the kernel refuses perf's records to the daemon.

    bpf/mappings.bpf.c   u64 start, length, offset in pages, inode | u32 device, pid | names of the path, the last first

The program runs in perf_event_mmap (kernel/events/core.c), which makes perf's records, and writes to one ring. What
found no room there is counted, and so are runs that the kernel skipped, since the program was interrupted on its CPU.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from importlib.resources import as_file, files

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.bpf_links import attach_to_tracepoint
from stapsdtd.kernel.bpf_object import BpfObject
from stapsdtd.kernel.function_links import FENTRY_TYPE, MULTI_TYPE, link_entries
from stapsdtd.kernel.own_programs import recursion_misses
from stapsdtd.kernel.perf import Lost, Mapped

FENTRY, MULTI = "fentry", "kprobe.multi"
_FUNCTION = "perf_event_mmap"
_PROGRAMS = {FENTRY: "on_mapping", MULTI: "on_mapping_by_kprobe"}
_OBJECT = "mappings.bpf.o"
_RECORD = struct.Struct("=QQQQII")
_MINOR_BITS = 20
"""Of the kernel's dev_t (include/linux/kdev_t.h)."""

_HEADER = struct.Struct("=II")
_BUSY, _DISCARDED = 1 << 31, 1 << 30
_PAGE = mmap.PAGESIZE
_CHECK_SECONDS = 0.1
"""Between looks at what the kernel skipped."""


def mapped(record: bytes) -> Mapped:
    """Decode what the program wrote."""
    start, length, pages, inode, device, pid = _RECORD.unpack_from(record)
    dev = os.makedev(device >> _MINOR_BITS, device & (1 << _MINOR_BITS) - 1)
    names = record[_RECORD.size :].split(b"\0")[:-1]
    path = procfs.shown_path(b"".join(b"/" + name for name in reversed(names)))
    return Mapped(pid, dev, inode, path, start, length, pages * _PAGE)


class RecordRing:
    """A BPF ring buffer with records of any size (kernel/bpf/ringbuf.c).

    page 0: consumer's position │ page 1: producer's position │ data │ the same data again
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """descriptor: the map's, which remains the caller's. Raises OSError."""
        self._size = size
        self._consumer = mmap.mmap(descriptor, _PAGE)
        self._rest = mmap.mmap(descriptor, _PAGE + 2 * size, prot=mmap.PROT_READ, offset=_PAGE)
        self._position = 0

    def take(self) -> Iterator[bytes]:
        """Yield the records that are complete."""
        (produced,) = struct.unpack_from("=Q", self._rest)
        while self._position < produced:
            at = _PAGE + self._position % self._size
            length, _ = _HEADER.unpack_from(self._rest, at)
            if length & _BUSY:
                break
            size = length & ~_DISCARDED
            if not length & _DISCARDED:
                yield self._rest[at + _HEADER.size : at + _HEADER.size + size]
            self._position += (_HEADER.size + size + 7) // 8 * 8
            struct.pack_into("=Q", self._consumer, 0, self._position)

    def close(self) -> None:
        self._consumer.close()
        self._rest.close()


class MappingPrograms:
    """The mapping records of all CPUs. way: how the program is attached, FENTRY or MULTI.

    Raises KernelFeatureError where the kernel has no such programs, or where it sees other process ids than the daemon.
    """

    def __init__(self, ways: tuple[str, ...] = (FENTRY, MULTI)) -> None:
        """ways: to try, in this order."""
        if procfs.pid_namespace() != procfs.INITIAL_PID_NAMESPACE:
            raise KernelFeatureError("mapping records", "this is a pid namespace of its own", "share the host's")
        refused: Exception | None = None
        for way in ways:
            try:
                self._object, self._link = _attached(way)
            except (KernelFeatureError, OSError) as error:
                refused = error
            else:
                self.way = way
                break
        else:
            raise KernelFeatureError(
                "mapping records",
                f"the kernel attaches no BPF program to {_FUNCTION} ({refused})",
                "run as root or with CAP_BPF and CAP_PERFMON, on a kernel with fentry or kprobe.multi",
            )
        self._program = self._object.program(_PROGRAMS[self.way])
        self._ring = RecordRing(self._object.map("mappings"), self._object.max_entries("mappings"))
        self._lost = self._object.table(".bss.lost")
        self._told = (0, 0)
        self._skipped = 0
        self._checked = 0.0

    def fileno(self) -> int:
        return self._object.map("mappings")

    def read(self) -> Iterator[Mapped | Lost]:
        """Yield pending records without waiting."""
        yield from map(mapped, self._ring.take())
        if (missing := (self._no_room(), self._skipped_runs())) != self._told:
            self._told = missing
            yield Lost()

    def _no_room(self) -> int:
        return int(struct.unpack_from("=Q", self._lost)[0])

    def _skipped_runs(self) -> int:
        now = time.monotonic()
        if now - self._checked >= _CHECK_SECONDS:
            self._checked = now
            self._skipped = recursion_misses(self._program)
        return self._skipped

    def close(self) -> None:
        os.close(self._link)
        self._ring.close()
        self._lost.close()
        self._object.close()


def _attached(way: str) -> tuple[BpfObject, int]:
    """Return the loaded object and the descriptor of a link. Raises KernelFeatureError and OSError."""
    attach_types: dict[str, int | None] = {name: None for other, name in _PROGRAMS.items() if other != way}
    attach_types[_PROGRAMS[way]] = FENTRY_TYPE if way == FENTRY else MULTI_TYPE
    with as_file(files("stapsdtd.kernel.objects") / _OBJECT) as path:
        loaded = BpfObject(str(path), {}, {}, attach_types=attach_types)
    program = loaded.program(_PROGRAMS[way])
    try:
        return loaded, attach_to_tracepoint(program) if way == FENTRY else link_entries(program, [_FUNCTION], [0])
    except OSError:
        loaded.close()
        raise
