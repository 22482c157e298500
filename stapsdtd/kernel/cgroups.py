"""cgroups of the unified hierarchy: from a path to what the kernel knows it by.

41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw        a line of /proc/self/mountinfo
41 31 0:38 /../.. /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw           the same in a cgroup namespace
0::/../../kubepods.slice/cri-containerd-….scope                             of another's /proc/PID/cgroup, seen there

A container has a cgroup namespace of its own, whose root is the container's cgroup (cgroup_namespaces(7)).
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
"""Of the hierarchy's root, fs/kernfs/dir.c: the first that is given out."""
_UP = ".."


@dataclass(frozen=True, slots=True)
class CgroupPlace:
    """id: the kernel's number of the cgroup, which is its directory's inode. level: its depth, the root's is 0."""

    id: int
    level: int


def find(path: str, mountinfo: str = "/proc/self/mountinfo") -> CgroupPlace | None:
    """Look a cgroup up by its path from the hierarchy's root, as `from_root` answers, or from the host's.

    None where there is no such cgroup. Raises KernelFeatureError where no cgroup2 is mounted.
    """
    place = _place(path, mountinfo)
    if place is None:
        return None
    directory, level = place
    try:
        found = os.stat(directory)
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return None
    return CgroupPlace(found.st_ino, level)


def from_root(path: str) -> str:
    """Answer the path from the hierarchy's root for one of /proc/PID/cgroup, which begins at this process's cgroup
    namespace; the path itself where that has the same root, or the host's hierarchy is not mounted here.
    """
    own = _namespace_root()
    names = path.strip("/").split("/")
    up = sum(name == _UP for name in names)
    return "/" + "/".join([*own[: len(own) - up], *filter(None, names[up:])]) if own and up <= len(own) else path


@cache
def _namespace_root() -> tuple[str, ...]:
    """The names that lead to the root of this process's cgroup namespace; none where that is the root of all, or is not
    to be told.
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


def every(mountinfo: str = "/proc/self/mountinfo") -> Iterator[str]:
    """Tell all cgroups by their paths from the hierarchy's root. Raises KernelFeatureError as `find` does."""
    root, mount_point = _mount(mountinfo)
    above = _names(root)
    for directory in _walk(mount_point):
        yield os.fsdecode(b"/" + b"/".join([*above, *_names(directory[len(mount_point) :])]))


def processes(path: str, mountinfo: str = "/proc/self/mountinfo") -> frozenset[int]:
    """Answer who is in a cgroup or below it now: nobody where it is gone. Raises KernelFeatureError as `find` does."""
    place = _place(path, mountinfo)
    found = (_members(each) for each in _walk(place[0])) if place else ()
    # who is in another pid namespace, and has no number here
    return frozenset().union(*found) - {0}


def _members(directory: bytes) -> frozenset[int]:
    # it may go meanwhile, and one of threads has no processes to tell
    with suppress(OSError), open(directory + b"/cgroup.procs", "rb") as pids:
        return frozenset(map(int, pids))
    return frozenset()


def _walk(directory: bytes) -> Iterator[bytes]:
    """Tell a directory and all below it, but for those that go meanwhile or whose paths are too long to be opened."""
    waiting = [directory]
    while waiting:
        here = waiting.pop()
        yield here
        with suppress(OSError), os.scandir(here) as entries:
            waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _place(path: str, mountinfo: str) -> tuple[bytes, int] | None:
    """Answer which directory a cgroup would be, and on which level; None for what is no path of one."""
    root, mount_point = _mount(mountinfo)
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


def _mount(mountinfo: str) -> tuple[bytes, bytes]:
    """Which part of the hierarchy is mounted, and where: all of it, if that is somewhere."""
    found = [mount for mount in mounts(mountinfo) if mount.kind == b"cgroup2"]
    for mount in found:
        if _is_whole(mount):
            return b"/", mount.point
    if found:
        return found[0].root, found[0].point
    raise KernelFeatureError(
        "cgroup2", "it is not mounted", "run 'mount -t cgroup2 none /sys/fs/cgroup/unified' as root"
    )


def _is_whole(mount: Mount) -> bool:
    """Whether all of the hierarchy is there, of which a cgroup namespace shows only how far up its root is."""
    is_root = mount.kind == b"cgroup2" and all(name == _UP.encode() for name in _names(mount.root))
    with suppress(OSError):
        return is_root and os.stat(mount.point).st_ino == _ROOT_INODE
    return False
