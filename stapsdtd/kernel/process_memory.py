"""Touch and classify memory of other processes; process_vm_readv(2)."""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

from stapsdtd.kernel import procfs, reach
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.host_calls import READ_MEMORY
from stapsdtd.kernel.inodes import inode_reader

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class _Vector(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    vectors = ctypes.POINTER(_Vector), ctypes.c_ulong
    library.process_vm_readv.argtypes = [ctypes.c_int, *vectors, *vectors, ctypes.c_ulong]
    return library


def touch(pid: int, address: int, byte_count: int) -> None:
    """Fault in every page of a range by reading a byte of each.

    Blocks for as long as whoever provides a page takes. Raises OSError if there is no such process or memory, or it is
    not readable.
    """
    last = address + max(byte_count, 1) - 1
    starts = [address, *range((address // _PAGE_BYTES + 1) * _PAGE_BYTES, last + 1, _PAGE_BYTES)]
    byte = ctypes.create_string_buffer(1)
    holder = procfs.memory_holder(pid)
    for start in starts:
        local, remote = _Vector(ctypes.addressof(byte), 1), _Vector(start, 1)
        if _libc().process_vm_readv(holder, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != 1:
            raise READ_MEMORY.refused(f"process {pid} at {start:#x}", ctypes.get_errno())


class LocalMemory:
    """Finds memory that is provided by the kernel alone, or by a file system that only root can block."""

    def __init__(self, filesystems: Filesystems) -> None:
        """filesystems: not shared with anything else."""
        self._filesystems = filesystems
        self._lock = threading.Lock()

    def local_bytes(self, pid: int, address: int) -> int:
        """Return how many bytes from address on are such memory.

        Blocks while the process holds its mmap_lock. Memory served by userfaultfd cannot be told apart. Raises OSError.
        """
        region = procfs.region_at(pid, address)
        if region is None:
            return 0
        room = region.end - address
        if not region.is_file:
            return room
        holder = procfs.memory_holder(pid)
        descriptor = reach.hold(f"/proc/{holder}/map_files/{region.start:x}-{region.end:x}")
        try:
            with self._lock:
                if self._filesystems.why_not(descriptor, holder) is None:
                    return room
            reader = inode_reader()
            inode = None if reader is None else reader.mapped_by(holder).get(region.start)
            with self._lock:
                return 0 if inode is None or self._filesystems.why_not(descriptor, holder, inode) else room
        finally:
            os.close(descriptor)
