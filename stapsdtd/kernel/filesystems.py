"""On which file systems a file may be armed: those that nobody but root can make wait.

    57 30 0:48 / /home/anne/far rw,nosuid - fuse.sshfs far: rw,user_id=1000       a line of /proc/PID/mountinfo

To arm a site, the kernel reads its page while every fork on the host waits (dup_mmap_sem in kernel/events/uprobes.c).
What a file lies on is told by mount tables alone, since a server that is asked may be the one that does not reply. The
kernel writes a mount's number, device and kind itself, whoever mounts; the rest is believed of mounts that root made.
"""

from __future__ import annotations

import os
import posixpath
import re
import select
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from stapsdtd.kernel import reach
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.mounts import Mount, mounts, parse
from stapsdtd.kernel.overlays import layers_of, shares_user_namespace

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "cramfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfs", "hfsplus",
        "iso9660", "jfs", "minix", "msdos", "nilfs2", "ntfs3", "ramfs", "reiserfs", "romfs", "rootfs", "squashfs",
        "tmpfs", "ubifs", "udf", "vfat", "xfs", "zfs",
    }
)  # fmt: skip
"""Served by the kernel from this host's memory and disks. Those that a network, a hypervisor or a process serves are
left out: fuse, fuseblk, virtiofs, 9p, nfs, cifs, ceph, gfs2, ocfs2, ...; ecryptfs and the like lie on any other."""

_PSEUDO = frozenset(
    {
        "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl", "hugetlbfs",
        "mqueue", "nsfs", "proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs",
    }
)  # fmt: skip
"""Without files that a process maps, and without a server."""

_OVERLAY = "overlay"
_MOST_STACKED = 4
"""Overlays and loop devices on each other. The kernel allows two overlays (FILESYSTEM_MAX_STACK_DEPTH)."""

_FIRST_PROCESS = 1
_OF_A_MAPPING = re.compile(r"/proc/(\d+)/map_files/")


class Filesystems:
    """armed_too: kinds beside LOCAL, as mountinfo names them, such as `fuse.mergerfs`.

    Of FUSE, only what root mounted counts: a user chooses the part behind the dot.
    """

    def __init__(self, armed_too: Collection[str] = (), devices: str = "/sys") -> None:
        self.calls = LockedCalls()
        self.armed_too = frozenset(armed_too)
        self._devices = devices
        self._tables = [_Table("/proc/self/mountinfo"), _Table(f"/proc/{_FIRST_PROCESS}/mountinfo")]
        self._memory = _device_of_memory()

    def why_not(self, descriptor: int, pid: int) -> str | None:
        """Why nothing may be armed in an open file, which this process maps; None where it may. Raises OSError."""
        device, number = reach.place_of(descriptor)
        if device == self._memory:
            return None
        tables = [table.mounts() for table in self._tables]
        for table in tables:
            if number in table:
                return self.judge(table[number], table)
        with suppress(OSError):
            theirs = {mount.number: mount for mount in mounts(f"/proc/{pid}/mountinfo")}
            if number in theirs:
                # layers are named as the mounter saw them, which was not from within
                outer = tables[-1] or tables[0]
                return self.judge(theirs[number], outer if shares_user_namespace(pid) else None)
        return "no mount that can be seen tells what file system it lies on"

    @contextmanager
    def held(self, way: str) -> Iterator[int]:
        """As reach.hold, for a while. Where root's configuration trusts all that is mounted, servers are asked.

        Raises ObjectPendingError where a process does not let anybody look.
        """
        if mapped := _OF_A_MAPPING.match(way):
            descriptor = self.calls.call(int(mapped[1]), lambda: reach.hold(way), os.close)
        else:
            descriptor = reach.hold(way, asks=self._trusts_all)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def status_at(self, path: str) -> reach.FileStatus:
        """As os.stat, where that sends no request to a server that may not reply. Raises OSError."""
        with self.held(path) as descriptor:
            return reach.status_of(descriptor)

    def _trusts_all(self) -> bool:
        """Such as 9p under an overlay as a virtual machine's root, of which the kernel's cache holds no names."""
        tables = [table.mounts() for table in self._tables]
        return bool(self.armed_too) and all(
            mount.kind.decode(errors="replace") in _PSEUDO or self.judge(mount, table) is None
            for table in tables
            for mount in table.values()
        )

    def judge(self, mount: Mount, trusted: dict[int, Mount] | None, depth: int = 0) -> str | None:
        """Why nothing may be armed in files of a mount. trusted: a table that tells of what it lies on; None where
        anybody may have mounted it.
        """
        kind = mount.kind.decode(errors="backslashreplace")
        if kind in self.armed_too:
            return None if _is_roots(mount, trusted) else f"it lies on {kind} that is not root's own mount"
        if kind == _OVERLAY and trusted is not None:
            below = [self._judge_place(layer, trusted, depth) for layer in layers_of(mount.options)]
        elif kind in LOCAL:
            below = [self._judge_place(file, trusted, depth) for file in self._files_behind(mount)]
        else:
            return _served(kind)
        return next(filter(None, below), None)

    def _judge_place(self, path: bytes, trusted: dict[int, Mount] | None, depth: int) -> str | None:
        """A folder or file that another file system lies on."""
        mount = None
        if trusted is not None and depth < _MOST_STACKED and path.startswith(b"/"):
            # of mounts on one point, the last one hides the others
            for each in trusted.values():
                if _is_within(path, each.point) and (mount is None or len(each.point) >= len(mount.point)):
                    mount = each
        if trusted is None or mount is None:
            return f"it lies on {path.decode(errors='backslashreplace')}, of which no mount tells what that is"
        return self.judge(mount, trusted, depth + 1)

    def _files_behind(self, mount: Mount) -> list[bytes]:
        """Of loop devices. A disk that a network serves is a path that no mount holds."""
        if mount.kind == b"btrfs":
            # it has a device number of its own, and may have several disks; this is the one that was mounted
            disks = [f"{self._devices}/class/block/{posixpath.basename(posixpath.realpath(os.fsdecode(mount.source)))}"]
        elif mount.device.startswith(b"0:"):
            return []
        else:
            disks = [f"{self._devices}/dev/block/{mount.device.decode()}"]
        found = []
        for disk in disks:
            real = posixpath.realpath(disk)
            with suppress(OSError):
                disks += [f"{real}/slaves/{slave}" for slave in os.listdir(f"{real}/slaves")]
            # that of a partition is in its disk's folder
            for folder in (real, posixpath.dirname(real)):
                with suppress(OSError), open(f"{folder}/loop/backing_file", "rb") as file:
                    found.append(file.read().rstrip(b"\n"))
            if "/nbd" in real:
                found.append(b"a disk of the network")
        return found


def _is_roots(mount: Mount, trusted: dict[int, Mount] | None) -> bool:
    """A user may mount FUSE, and in a user namespace whatever has FS_USERNS_MOUNT; of these only FUSE can wait."""
    if not mount.kind.startswith(b"fuse"):
        return True
    return trusted is not None and b"user_id=0" in mount.options.split(b",")


def _served(kind: str) -> str:
    return (
        f"it lies on {kind}: whoever serves that could make every fork on this host wait while a site is armed; "
        f'[filesystems] arm = ["{kind}"] in the configuration allows it'
    )


def _is_within(path: bytes, point: bytes) -> bool:
    return (path.rstrip(b"/") + b"/").startswith(point.rstrip(b"/") + b"/")


def _device_of_memory() -> int:
    """The kernel's own mount of shmem, which is in no table: memfds, SysV shared memory and /dev/zero lie there."""
    descriptor = os.memfd_create("stapsdt-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


class _Table:
    """A mountinfo, which is read again when the kernel tells of a change; empty where it may not be read."""

    def __init__(self, path: str) -> None:
        self._mounts: dict[int, Mount] = {}
        self._changes = select.epoll()
        weakref.finalize(self, self._changes.close)
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            self._changes.register(self._descriptor, select.EPOLLPRI)
            self._read()

    def mounts(self) -> dict[int, Mount]:
        """By their numbers, in the order that they are shown in."""
        if self._changes.poll(0):
            self._read()
        return self._mounts

    def _read(self) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with open(self._descriptor, "rb", closefd=False) as file:
            self._mounts = {mount.number: mount for mount in parse(file.read())}
