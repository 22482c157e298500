"""Look up cgroups of the unified hierarchy by path.

41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw        a line of /proc/self/mountinfo
41 31 0:38 /../.. /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw           the same in a cgroup namespace
0::/../../kubepods.slice/cri-containerd-….scope                             another process's /proc/PID/cgroup there

A container has its own cgroup namespace, rooted at the container's cgroup (cgroup_namespaces(7)).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.mounts import Mount, mounts

_ROOT_INODE = 1
"""The hierarchy's root is the first inode that kernfs allocates (fs/kernfs/dir.c)."""
_UP = ".."


@dataclass(frozen=True, slots=True)
class CgroupInfo:
    """id: the kernel's cgroup id, which is the directory's inode number. level: depth below the root, which is 0."""

    id: int
    level: int


def find(path: str, mountinfo: str = "/proc/self/mountinfo") -> CgroupInfo | None:
    """Look up a cgroup by its path from the hierarchy's root, as `from_root` returns it, or from the host's root.

    Return None if there is no such cgroup. Raises KernelFeatureError if cgroup2 is not mounted.
    """
    location = _locate(path, mountinfo)
    if location is None:
        return None
    directory, level = location
    try:
        status = os.stat(directory)
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    return CgroupInfo(status.st_ino, level)


def from_root(path: str) -> str:
    """Convert a path from /proc/PID/cgroup, relative to this process's cgroup namespace, to one from the hierarchy's
    root. Return it unchanged if both roots are the same, or the host's hierarchy is not mounted here.
    """
    root = _namespace_root()
    names = path.strip("/").split("/")
    up = sum(name == _UP for name in names)
    return "/" + "/".join([*root[: len(root) - up], *filter(None, names[up:])]) if root and up <= len(root) else path


@cache
def _namespace_root() -> tuple[str, ...]:
    """Return the path components of the root of this process's cgroup namespace; none if that is the hierarchy's root
    or cannot be determined.
    """
    below = _names(_own_cgroup())
    for mount in mounts():
        up = len(_names(mount.root))
        if _is_whole(mount) and up:
            for directory in _walk(mount.point):
                names = _names(directory[len(mount.point) :])
                if len(names) == up + len(below) and names[up:] == below and os.getpid() in _members(directory):
                    return tuple(map(os.fsdecode, names[:up]))
    return ()


def _own_cgroup() -> bytes:
    lines = procfs.cgroup_lines(os.getpid()).split(b"\n")
    return next((line.removeprefix(b"0::") for line in lines if line.startswith(b"0::")), b"")


def all_paths(mountinfo: str = "/proc/self/mountinfo") -> Iterator[str]:
    """Yield every cgroup's path from the hierarchy's root. Raises KernelFeatureError as `find` does."""
    root, mount_point = mounted(mountinfo)
    above = _names(root)
    for directory in _walk(mount_point):
        yield os.fsdecode(b"/" + b"/".join([*above, *_names(directory[len(mount_point) :])]))


def processes(path: str, mountinfo: str = "/proc/self/mountinfo") -> frozenset[int]:
    """Return the pids now in a cgroup or below it; none if it is gone. Raises KernelFeatureError as `find` does."""
    location = _locate(path, mountinfo)
    members = (_members(directory) for directory in _walk(location[0])) if location else ()
    # 0 stands for processes of other pid namespaces, which have no pid here
    return frozenset().union(*members) - {0}


def _members(directory: bytes) -> frozenset[int]:
    # it may be removed at any time, and a threaded cgroup cannot list processes
    with suppress(OSError), open(directory + b"/cgroup.procs", "rb") as pids:
        return frozenset(map(int, pids))
    return frozenset()


def _walk(directory: bytes) -> Iterator[bytes]:
    """Yield a directory and all below it, except those removed meanwhile or with paths too long to open."""
    pending = [directory]
    while pending:
        current = pending.pop()
        yield current
        with suppress(OSError), os.scandir(current) as entries:
            pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _locate(path: str, mountinfo: str) -> tuple[bytes, int] | None:
    """Return the directory and level that a cgroup would have; None if path cannot be a cgroup's."""
    root, mount_point = mounted(mountinfo)
    names = _names(os.fsencode(path))
    if not path.startswith("/") or "\0" in path or {b".", b".."} & set(names):
        return None
    above = _names(root)
    if names[: len(_names(mount_point))] == _names(mount_point):
        names = names[len(_names(mount_point)) :]
    elif names[: len(above)] == above:
        names = names[len(above) :]
    else:
        return None
    return b"/".join([mount_point, *names]), len(above) + len(names)


def _names(path: bytes) -> list[bytes]:
    return [name for name in path.split(b"/") if name]


def mounted(mountinfo: str) -> tuple[bytes, bytes]:
    """Return the root and the mount point of a cgroup2 mount, preferring one of the whole hierarchy.

    Raises KernelFeatureError if there is none.
    """
    candidates = [mount for mount in mounts(mountinfo) if mount.kind == b"cgroup2"]
    for mount in candidates:
        if _is_whole(mount):
            return b"/", mount.point
    if candidates:
        return candidates[0].root, candidates[0].point
    raise KernelFeatureError(
        "cgroup2", "it is not mounted", "run 'mount -t cgroup2 none /sys/fs/cgroup/unified' as root"
    )


def _is_whole(mount: Mount) -> bool:
    """Report whether the whole hierarchy is mounted there; in a cgroup namespace, mountinfo shows only `..`s for it."""
    is_root = mount.kind == b"cgroup2" and all(name == _UP.encode() for name in _names(mount.root))
    with suppress(OSError):
        return is_root and os.stat(mount.point).st_ino == _ROOT_INODE
    return False
