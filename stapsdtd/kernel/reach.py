"""Open and stat files without sending a request to their file system's server, which may never reply.

A thread that waits for a FUSE server cannot be interrupted by any signal (request_wait_answer in fs/fuse/dev.c). These
send no request: O_PATH through a link in /proc; openat2's RESOLVE_CACHED (Linux 5.12), which fails with EAGAIN if a
name is not cached; and statx's AT_STATX_DONT_SYNC.
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

from stapsdtd.kernel.host_calls import OPEN_FILE, STATUS, host_call

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000
_STATX_BASIC_STATS = 0x7FF

_OPENAT2 = 437
"""The same on all architectures."""
_OPEN_HOW = struct.Struct("=QQQ")
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_CACHED = 0x20

_ATTEMPTS = 10
"""RESOLVE_CACHED may fail because of a concurrent mount or rename anywhere on the host."""

_PROCESS_ROOT = re.compile(r"(/proc/(?:\d+|self)/root)(/.*)", re.DOTALL)

_libc = ctypes.CDLL(None, use_errno=True)


class FileStatus(NamedTuple):
    """Fields of os.stat_result, and mount: the id in /proc/PID/mountinfo."""

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
    """Return an open file's status from the kernel's cache. Raises OSError."""
    return _status(descriptor, _STATX_BASIC_STATS)


def device_and_mount(descriptor: int) -> tuple[int, int]:
    """Return the device and mount id of an open file, even on a FUSE that denies access to others. Raises OSError."""
    status = _status(descriptor, 0)
    return status.st_dev, status.mount


def _status(descriptor: int, mask: int) -> FileStatus:
    statx = _Statx()
    if _libc.statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, mask, ctypes.byref(statx)):
        raise STATUS.refused(f"descriptor {descriptor}", ctypes.get_errno())
    return FileStatus(
        os.makedev(statx.device_major, statx.device_minor),
        statx.inode,
        statx.mode,
        statx.links,
        statx.uid,
        statx.size,
        statx.modified.seconds * 1_000_000_000 + statx.modified.nanoseconds,
        statx.mount,
    )


def hold(path: str, may_query: Callable[[], bool] = lambda: False) -> int:
    """Return an O_PATH descriptor of the file at path, which can be opened as /proc/self/fd/N. Raises OSError.

    path: one of procfs.ways_to, or any other. That must be in the kernel's cache, unless may_query allows requests to
    servers.
    """
    match = _PROCESS_ROOT.fullmatch(path)
    if match is None and path.startswith("/proc/"):
        with host_call(OPEN_FILE):
            return os.open(path, os.O_PATH | os.O_CLOEXEC)
    if match is None:
        return _open(_AT_FDCWD, path, 0, may_query)
    with host_call(OPEN_FILE):
        root = os.open(match[1], os.O_PATH | os.O_CLOEXEC)
    try:
        return _open(root, match[2], _RESOLVE_IN_ROOT, may_query)
    finally:
        os.close(root)


def _open(directory: int, path: str, resolve: int, may_query: Callable[[], bool]) -> int:
    name = path.encode(errors="surrogateescape")
    if b"\0" in name:
        raise OPEN_FILE.refused(path, errno.EINVAL)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            return _openat2(directory, name, resolve | _RESOLVE_CACHED)
    return _openat2(directory, name, resolve if may_query() else resolve | _RESOLVE_CACHED)


def _openat2(directory: int, name: bytes, resolve: int) -> int:
    how = _OPEN_HOW.pack(os.O_PATH | os.O_CLOEXEC, 0, resolve)
    descriptor: int = _libc.syscall(_OPENAT2, directory, name, how, ctypes.c_size_t(len(how)))
    if descriptor < 0:
        raise OPEN_FILE.refused(os.fsdecode(name), ctypes.get_errno())
    return descriptor


def cached_status(path: str) -> FileStatus:
    """Like os.stat, but only from the kernel's cache. Raises OSError."""
    descriptor = hold(path)
    try:
        return status_of(descriptor)
    finally:
        os.close(descriptor)
