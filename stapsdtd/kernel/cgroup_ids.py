"""Look up cgroups of the unified hierarchy by their ids, as bpf_get_current_cgroup_id() returns them.

open_by_handle_at(2) takes such an id for the handle of a file on cgroup2 (kernfs_fh_to_dentry in fs/kernfs/mount.c),
and needs CAP_DAC_READ_SEARCH.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.host_calls import OPEN_CGROUP, host_call

_HANDLE = struct.Struct("=IiQ")
_HANDLE_HEADER = 8
"""struct file_handle of include/linux/fs.h, with the id of a kernfs node."""
_FILEID_KERNFS = 0xFE
"""include/linux/exportfs.h"""
_DELETED = b" (deleted)"
_RETRY_SECONDS = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


class CgroupGoneError(Exception):
    """No cgroup has this id any more."""


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """descriptor: of the mount point. root: path of what is mounted there. point: where."""

    descriptor: int
    root: bytes
    point: bytes


class CgroupIds:
    """Called from one thread."""

    def __init__(self, mountinfo: str = "/proc/self/mountinfo", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._mountinfo = mountinfo
        self._clock = clock
        self._hierarchy: _Hierarchy | None = None
        self._tried_at = float("-inf")

    def close(self) -> None:
        if self._hierarchy is not None:
            os.close(self._hierarchy.descriptor)
            self._hierarchy = None

    def path_of(self, cgroup_id: int) -> bytes:
        """Return a cgroup's path from the hierarchy's root, as `cgroups.find` takes it.

        Raises CgroupGoneError, and OSError if it cannot be looked up now.
        """
        hierarchy = self._mounted()
        try:
            descriptor = _open_by_id(hierarchy.descriptor, cgroup_id)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise CgroupGoneError from error
            raise
        try:
            directory = os.readlink(f"/proc/self/fd/{descriptor}".encode())
            if directory.endswith(_DELETED) and not _leads_to(directory, cgroup_id):
                raise CgroupGoneError
        finally:
            os.close(descriptor)
        if directory != hierarchy.point and not directory.startswith(hierarchy.point.rstrip(b"/") + b"/"):
            raise OPEN_CGROUP.refused(f"cgroup {cgroup_id}, above what is mounted here", errno.ENOENT)
        return b"/" + b"/".join(filter(None, (hierarchy.root + directory[len(hierarchy.point) :]).split(b"/")))

    def _mounted(self) -> _Hierarchy:
        """Raises OSError."""
        if self._hierarchy is None:
            now = self._clock()
            if now - self._tried_at < _RETRY_SECONDS:
                raise OPEN_CGROUP.refused("the hierarchy of cgroups", errno.ENOENT)
            self._tried_at = now
            try:
                root, point = cgroups.mounted(self._mountinfo)
            except KernelFeatureError as error:
                raise OPEN_CGROUP.refused("the hierarchy of cgroups", errno.ENOENT) from error
            with host_call(OPEN_CGROUP):
                descriptor = os.open(point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._hierarchy = _Hierarchy(descriptor, root.rstrip(b"/"), point)
        return self._hierarchy


def _leads_to(path: bytes, cgroup_id: int) -> bool:
    try:
        return os.stat(path).st_ino == cgroup_id
    except OSError:
        return False


def _open_by_id(mount: int, cgroup_id: int) -> int:
    """Raises OSError."""
    handle = _HANDLE.pack(_HANDLE.size - _HANDLE_HEADER, _FILEID_KERNFS, cgroup_id)
    descriptor: int = _libc.open_by_handle_at(mount, handle, os.O_PATH | os.O_CLOEXEC)
    if descriptor < 0:
        raise OPEN_CGROUP.refused(f"cgroup {cgroup_id}", ctypes.get_errno())
    return descriptor
