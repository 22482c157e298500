"""Reach files without a request to whoever serves their file system, who may never reply.

A FUSE server that was sent a request holds the thread that waits for it, and no signal ends that (request_wait_answer
in fs/fuse/dev.c). These send none: O_PATH through a link of /proc; openat2's RESOLVE_CACHED (Linux 5.12), which fails
with EAGAIN rather than look up what the kernel does not know; and statx's AT_STATX_DONT_SYNC.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import struct
from collections.abc import Callable
from typing import NamedTuple

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BASIC_STATS = 0x7FF

_OPENAT2 = 437
"""The same on all machines."""
_OPEN_HOW = struct.Struct("=QQQ")
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_CACHED = 0x20

_TRIES = 10
"""A mount or a rename anywhere on the host disturbs some."""

_IN_A_ROOT = re.compile(r"(/proc/(?:\d+|self)/root)(/.*)", re.DOTALL)

_libc = ctypes.CDLL(None, use_errno=True)


class FileStatus(NamedTuple):
    """As of os.stat_result, and mount: the number of /proc/PID/mountinfo."""

    st_dev: int
    st_ino: int
    st_mode: int
    st_nlink: int
    st_uid: int
    st_size: int
    st_mtime_ns: int
    mount: int

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.st_mode)


class _Timestamp(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_uint32), ("reserved", ctypes.c_int32))


class _Statx(ctypes.Structure):
    """struct statx of include/uapi/linux/stat.h."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("attributes", ctypes.c_uint64),
        ("links", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
        ("mode", ctypes.c_uint16),
        ("spare", ctypes.c_uint16),
        ("inode", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("attributes_mask", ctypes.c_uint64),
        ("accessed", _Timestamp),
        ("created", _Timestamp),
        ("changed", _Timestamp),
        ("modified", _Timestamp),
        ("special_major", ctypes.c_uint32),
        ("special_minor", ctypes.c_uint32),
        ("device_major", ctypes.c_uint32),
        ("device_minor", ctypes.c_uint32),
        ("mount", ctypes.c_uint64),
        ("more", ctypes.c_uint64 * 13),
    )


def status_of(descriptor: int) -> FileStatus:
    """What the kernel knows of an open file without asking its file system. Raises OSError."""
    return _status(descriptor, _STATX_BASIC_STATS)


def place_of(descriptor: int) -> tuple[int, int]:
    """The device of an open file's file system, and its mount's number; of a FUSE that lets nobody else in, too.

    Raises OSError.
    """
    found = _status(descriptor, 0)
    return found.st_dev, found.mount


def _status(descriptor: int, mask: int) -> FileStatus:
    found = _Statx()
    if _libc.statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, mask, ctypes.byref(found)):
        raise _failed("statx")
    return FileStatus(
        os.makedev(found.device_major, found.device_minor),
        found.inode,
        found.mode,
        found.links,
        found.uid,
        found.size,
        found.modified.seconds * 1_000_000_000 + found.modified.nanoseconds,
        found.mount,
    )


def hold(way: str, asks: Callable[[], bool] = lambda: False) -> int:
    """A descriptor that stays with what a path leads to now, and can be opened as /proc/self/fd/N. Raises OSError.

    way: one of procfs.ways_to, or any other path, which has to be in the kernel's cache, unless servers may be asked.
    """
    within = _IN_A_ROOT.fullmatch(way)
    if within is None and way.startswith("/proc/"):
        return os.open(way, os.O_PATH | os.O_CLOEXEC)
    if within is None:
        return _open(_AT_FDCWD, way, 0, asks)
    root = os.open(within[1], os.O_PATH | os.O_CLOEXEC)
    try:
        return _open(root, within[2], _RESOLVE_IN_ROOT, asks)
    finally:
        os.close(root)


def _open(folder: int, path: str, resolve: int, asks: Callable[[], bool]) -> int:
    name = path.encode(errors="surrogateescape")
    if b"\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            return _openat2(folder, name, resolve | _RESOLVE_CACHED)
    return _openat2(folder, name, resolve if asks() else resolve | _RESOLVE_CACHED)


def _openat2(folder: int, name: bytes, resolve: int) -> int:
    how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, resolve)
    descriptor: int = _libc.syscall(_OPENAT2, folder, name, how, ctypes.c_size_t(len(how)))
    if descriptor < 0:
        raise _failed("openat2")
    return descriptor


def cached_status(path: str) -> FileStatus:
    """As os.stat, where the kernel knows that without asking anybody. Raises OSError."""
    descriptor = hold(path)
    try:
        return status_of(descriptor)
    finally:
        os.close(descriptor)


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
