"""The inodes behind mapped files, from a BPF iterator over one process's memory map.

    bpf/inodes.bpf.c ──loaded once──► program ──link for one task, read──► {start address: MappedInode}

An uprobe belongs to the inode of `vma->vm_file`. Neither stat nor, since Linux 6.8, /proc/PID/maps shows that one for a
file of an overlay: each overlay has a device of its own. Both show another device for a file of btrfs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import resources
from typing import NamedTuple

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import objects, procfs
from stapsdtd.kernel.bpf_links import LinkOptions, create_link
from stapsdtd.kernel.bpf_object import BpfObject
from stapsdtd.kernel.host_calls import BPF_ITER_CREATE, BUFFER_MMAP
from stapsdtd.kernel.libbpf import last_error, library
from stapsdtd.kernel.locked import LockedCalls

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

_ATTACH_TYPE_ITER = 28
_MAPPED_INODE = struct.Struct("=QQQI20s")
"""struct mapped_inode of bpf/inodes.bpf.c."""
_MINOR_BITS = 20
_READ_BYTES = _MAPPED_INODE.size * 1024
_MAX_MAPPINGS = 1 << 17
"""Of files, per process: twice what vm.max_map_count allows by default. Further ones stay unknown."""

_SAME_NUMBERS = frozenset({"btrfs", "bcachefs"})
"""File systems whose subvolumes give the same inode numbers to different inodes."""


class MappedInode(NamedTuple):
    """dev: i_sb->s_dev, encoded as st_dev. kind: the file system's type; empty if unknown.

    instance: tells apart inodes of one number, as long as they are in memory; 0 where numbers are unique. It is the
    address of the kernel's struct inode, and must not leave the daemon.
    """

    dev: int
    number: int
    kind: str = ""
    instance: int = 0


class InodeReader:
    """Lists the inodes that processes map. Any thread may use it."""

    def __init__(self) -> None:
        """Raises KernelFeatureError."""
        with resources.as_file(resources.files(objects) / "inodes.bpf.o") as path:
            self._object = BpfObject(str(path), {}, {})
        self._program = self._object.program("list_inodes")
        try:
            # before Linux 6.1, which has no links for one task, this is E2BIG: an iterator over all processes would
            # wait for the locks of all
            os.close(self._link(pid=os.getpid()))
            if not self.mapped_by(os.getpid()):
                raise KernelFeatureError("inodes", "an iterator over this process's memory map shows nothing", "")
        except OSError as error:
            self._object.close()
            reason = f"the kernel has no iterator over one process's memory map ({error})"
            raise KernelFeatureError("inodes", reason, "use Linux 6.1 or newer") from error

    def mapped_by(self, tid: int) -> dict[int, MappedInode]:
        """Return the inodes of the files that a thread's memory map has, by start address.

        Blocks while the process holds its mmap_lock (mmap_read_lock_killable in kernel/bpf/task_iter.c). Empty if there
        is no such thread. Raises OSError.
        """
        link = self._link(tid=tid)
        try:
            iterator: int = library().bpf_iter_create(link)
            if iterator < 0:
                raise last_error(BPF_ITER_CREATE, f"the memory map of thread {tid}")
        finally:
            os.close(link)
        try:
            return dict(_read_all(iterator))
        finally:
            os.close(iterator)

    def of_open(self, descriptor: int) -> MappedInode | None:
        """Return the inode of a file that is open for reading, by mapping it. Raises OSError."""
        address = _libc.mmap(None, 1, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
        if address == _MAP_FAILED:
            raise last_error(BUFFER_MMAP, f"descriptor {descriptor}")
        try:
            return self.mapped_by(os.getpid()).get(address)
        finally:
            _libc.munmap(address, 1)

    def _link(self, *, tid: int = 0, pid: int = 0) -> int:
        # union bpf_iter_link_info, whose member task is struct { __u32 tid, pid, pid_fd; }
        info = (ctypes.c_uint32 * 3)(tid, pid, 0)
        options = LinkOptions(iter_info=ctypes.addressof(info), iter_info_len=ctypes.sizeof(info))
        return create_link(self._program, 0, _ATTACH_TYPE_ITER, options, f"the memory map of process {tid or pid}")


def _read_all(iterator: int) -> Iterator[tuple[int, MappedInode]]:
    """Yield start addresses, which ascend, and inodes. Raises OSError."""
    last, count = -1, 0
    while count < _MAX_MAPPINGS and (chunk := os.read(iterator, _READ_BYTES)):
        records = [_parsed(record) for record in _MAPPED_INODE.iter_unpack(chunk)]
        if records[0][0] <= last:
            # where one buffer did not hold all, the kernel returns the last mappings over and over (tried on 6.18)
            return
        yield from records
        last = records[-1][0]
        count += len(records)


def _parsed(record: tuple[int, int, int, int, bytes]) -> tuple[int, MappedInode]:
    start, number, address, dev, raw_kind = record
    kind = raw_kind.partition(b"\0")[0].decode(errors="backslashreplace")
    real = MappedInode(
        os.makedev(dev >> _MINOR_BITS, dev & (1 << _MINOR_BITS) - 1),
        number,
        kind,
        address if kind in _SAME_NUMBERS else 0,
    )
    return start, real


@cache
def _load() -> InodeReader | KernelFeatureError:
    try:
        return InodeReader()
    except KernelFeatureError as error:
        return error


def load() -> InodeReader:
    """Return the reader, which is loaded once.

    Raises KernelFeatureError if this host or this process's rights do not allow it.
    """
    loaded = _load()
    if isinstance(loaded, KernelFeatureError):
        raise KernelFeatureError(loaded.feature, loaded.reason, loaded.remedy)
    return loaded


def inode_reader() -> InodeReader | None:
    """Return the reader; None if there is none, so that overlays' layers are looked up by name."""
    loaded = _load()
    return loaded if isinstance(loaded, InodeReader) else None


def why_no_reader() -> str:
    """Return why there is no reader and what to do about it; empty if there is one."""
    loaded = _load()
    return "" if isinstance(loaded, InodeReader) else f"{loaded.reason}; {loaded.remedy}"


class ProcessInodes:
    """The inodes behind one process's mappings, read when the first one is asked for.

    To be made after the process's maps were read, and to be asked before a mapping is reached through map_files: if
    that leads to the file in maps, the same file was mapped there in between.
    """

    def __init__(self, pid: int, calls: LockedCalls, reader: Callable[[], InodeReader | None] = inode_reader) -> None:
        self._pid = pid
        self._calls = calls
        self._reader = reader
        self._inodes: dict[int, MappedInode] | None = None

    @cached_property
    def thread(self) -> int:
        """Return the thread whose directory in /proc shows the process's memory."""
        return procfs.memory_holder(self._pid)

    def at(self, start: int) -> MappedInode | None:
        """Return the inode that is mapped at a start address; None if it cannot be known.

        Raises ObjectPendingError if the process holds the lock of its map, and OSError.
        """
        if self._inodes is None:
            reader = self._reader()
            if reader is None:
                self._inodes = {}
            else:
                thread = self.thread
                self._inodes = self._calls.call(self._pid, lambda: reader.mapped_by(thread))
        return self._inodes.get(start)
