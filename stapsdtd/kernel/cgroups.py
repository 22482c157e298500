"""cgroups of the unified hierarchy: from a path to what the kernel knows it by.

41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw        a line of /proc/self/mountinfo
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.mounts import mounts


@dataclass(frozen=True, slots=True)
class CgroupPlace:
    """id: the kernel's number of the cgroup, which is its directory's inode. level: its depth, the root's is 0."""

    id: int
    level: int


def find(path: str, mountinfo: str = "/proc/self/mountinfo") -> CgroupPlace | None:
    """Look a cgroup up by its path from the hierarchy's root, as in /proc/PID/cgroup, or from the host's.

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


def every(mountinfo: str = "/proc/self/mountinfo") -> Iterator[str]:
    """Tell all cgroups by their paths from the hierarchy's root. Raises KernelFeatureError as `find` does."""
    root, mount_point = _mount(mountinfo)
    above = _names(root)
    for directory in _walk(mount_point):
        yield os.fsdecode(b"/" + b"/".join([*above, *_names(directory[len(mount_point) :])]))


def processes(path: str, mountinfo: str = "/proc/self/mountinfo") -> frozenset[int]:
    """Answer who is in a cgroup or below it now: nobody where it is gone. Raises KernelFeatureError as `find` does."""
    place = _place(path, mountinfo)
    found: set[int] = set()
    for each in _walk(place[0]) if place else ():
        # it may go meanwhile, and one of threads has no processes to tell
        with suppress(OSError), open(each + b"/cgroup.procs", "rb") as pids:
            found.update(map(int, pids))
    # who is in another pid namespace, and has no number here
    return frozenset(found - {0})


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
    """Which part of the hierarchy is mounted, and where."""
    for mount in mounts(mountinfo):
        if mount.kind == b"cgroup2":
            return mount.root, mount.point
    raise KernelFeatureError(
        "cgroup2", "it is not mounted", "run 'mount -t cgroup2 none /sys/fs/cgroup/unified' as root"
    )
