"""Decide on which file systems files may be armed: those that only root can block.

    57 30 0:48 / /home/anne/far rw,nosuid - fuse.sshfs far: rw,user_id=1000       a line of /proc/PID/mountinfo

To arm a site, the kernel reads its page while every fork on the host waits (dup_mmap_sem in kernel/events/uprobes.c).
Only mount tables are consulted, since querying the file system could block on the very server that does not reply. A
mount's id, device and type come from the kernel, whoever mounts; everything else is trusted only for root's mounts.
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
from stapsdtd.kernel.inodes import MappedInode, ProcessInodes
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.mounts import Mount, find, parse
from stapsdtd.kernel.overlays import OVERLAY, layers_of, shares_user_namespace

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "cramfs", "devtmpfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfs", "hfsplus",
        "iso9660", "jfs", "minix", "msdos", "nilfs2", "ntfs3", "ramfs", "reiserfs", "romfs", "rootfs", "squashfs",
        "tmpfs", "ubifs", "udf", "vfat", "xfs", "zfs",
    }
)  # fmt: skip
"""Served by the kernel from this host's memory and disks. Left out are those served by a network, a hypervisor or a
process (fuse, fuseblk, virtiofs, 9p, nfs, cifs, ceph, gfs2, ocfs2, ...) and those stacked on any other (ecryptfs, ...).
"""

_PSEUDO = frozenset(
    {
        "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl", "hugetlbfs",
        "mqueue", "nsfs", "proc", "pstore", "securityfs", "selinuxfs", "sysfs", "tracefs",
    }
)  # fmt: skip
"""These have no server, and no files that a process maps."""

_OTHER_INODES = frozenset({OVERLAY, "bcachefs", "btrfs"})
"""On these, what stat shows is not the inode that uprobes compare, or does not tell it from another one."""

_OF_MEMORY = frozenset({"ramfs", "tmpfs"})
"""Served from memory alone, whoever mounted them."""

_MAX_STACK_DEPTH = 4
"""Of overlays and loop devices. The kernel allows two overlays (FILESYSTEM_MAX_STACK_DEPTH)."""

_FIRST_PID = 1
_MAP_FILES = re.compile(r"/proc/(\d+)/map_files/")


class Filesystems:
    """armed_too: types beyond LOCAL, as named in mountinfo, such as `fuse.mergerfs`.

    FUSE counts only if root mounted it: users choose the part after the dot. first_pid: the process that sees what the
    host has mounted, though this one may be in a sandbox.
    """

    def __init__(self, armed_too: Collection[str] = (), devices: str = "/sys", *, first_pid: int = _FIRST_PID) -> None:
        self.calls = LockedCalls()
        self.armed_too = frozenset(armed_too)
        self.first_pid = first_pid
        self._devices = devices
        self._tables = [_Table("/proc/self/mountinfo"), _Table(f"/proc/{first_pid}/mountinfo")]
        self._shmem = _shmem_device()

    def why_not(self, descriptor: int, pid: int, inode: MappedInode | None = None) -> str | None:
        """Return why an open file that process pid maps must not be armed; None if it may. Raises OSError.

        inode: the kernel's, if known. Arming reads the inode's pages, so that its file system is harmless or not,
        whatever is stacked on it.
        """
        reason = self._why_not_mounted(descriptor, pid)
        return self._why_not_inode(inode) if reason is not None and inode is not None else reason

    def _why_not_mounted(self, descriptor: int, pid: int) -> str | None:
        device, mount_id = reach.device_and_mount(descriptor)
        if device == self._shmem:
            return None
        tables = list(self._mounts())
        for table in tables:
            if mount_id in table:
                return self.judge(table[mount_id], table)
        if mount := _mount_of(pid, mount_id):
            # layers are named as the mounter saw them, from outside the container
            outer = tables[-1] or tables[0]
            return self.judge(mount, outer if shares_user_namespace(pid) else None)
        return "no visible mount shows which file system the file is on"

    def _why_not_inode(self, inode: MappedInode) -> str | None:
        device = f"{os.major(inode.dev)}:{os.minor(inode.dev)}".encode()
        for table in self._mounts():
            for mount in table.values():
                if mount.device == device:
                    return self.judge(mount, table)
        if inode.kind in _OF_MEMORY:
            return None
        return f"the file is on {inode.kind or 'a file system'} that no visible mount shows"

    def shows_inodes(self, status: reach.FileStatus) -> bool:
        """Report whether a file's device and inode number are surely those of the inode that uprobes compare."""
        if os.major(status.st_dev) or status.st_dev == self._shmem:
            return True
        mount = next((table[status.mount] for table in self._mounts() if status.mount in table), None)
        return mount is not None and mount.kind.decode(errors="replace") not in _OTHER_INODES

    def kind_of(self, descriptor: int, pid: int) -> str:
        """Return the type of the file system that an open file of process pid is on; empty if no mount shows it.

        Raises OSError.
        """
        _, mount_id = reach.device_and_mount(descriptor)
        mount = next((table[mount_id] for table in self._mounts() if mount_id in table), None)
        mount = mount or _mount_of(pid, mount_id)
        return "" if mount is None else mount.kind.decode(errors="backslashreplace")

    def inodes_of(self, pid: int) -> ProcessInodes:
        """Return the inodes that a process maps, whose maps have been read."""
        return ProcessInodes(pid, self.calls)

    def _mounts(self) -> Iterator[dict[int, Mount]]:
        return (table.mounts() for table in self._tables)

    @contextmanager
    def held(self, path: str) -> Iterator[int]:
        """reach.hold as a context manager. Servers may be queried if root's configuration trusts every mount.

        Raises ObjectPendingError if the process blocks access to its mappings.
        """
        if match := _MAP_FILES.match(path):
            descriptor = self.calls.call(int(match[1]), lambda: reach.hold(path), os.close)
        else:
            descriptor = reach.hold(path, may_query=self._trusts_all)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def status_at(self, path: str) -> reach.FileStatus:
        """Like os.stat, but send no request to a server that may not reply. Raises OSError."""
        with self.held(path) as descriptor:
            return reach.status_of(descriptor)

    def _trusts_all(self) -> bool:
        """Report whether every mount is trusted. Needed where no names are cached, such as on a VM's root that is an
        overlay over 9p.
        """
        tables = list(self._mounts())
        return bool(self.armed_too) and all(
            mount.kind.decode(errors="replace") in _PSEUDO or self.judge(mount, table) is None
            for table in tables
            for mount in table.values()
        )

    def judge(self, mount: Mount, trusted: dict[int, Mount] | None, depth: int = 0) -> str | None:
        """Return why files of a mount must not be armed; None if they may. trusted: the mounts in which to look up what
        it is stacked on; None if anyone may have mounted it.
        """
        kind = mount.kind.decode(errors="backslashreplace")
        if kind in self.armed_too:
            return None if _is_mounted_by_root(mount, trusted) else f"the file is on {kind} that root did not mount"
        if kind == OVERLAY and trusted is not None:
            reasons = [self._judge_path(layer, trusted, depth) for layer in layers_of(mount.options)]
        elif kind in LOCAL:
            reasons = [self._judge_path(file, trusted, depth) for file in self._backing_files(mount)]
        else:
            return _untrusted(kind)
        return next(filter(None, reasons), None)

    def _judge_path(self, path: bytes, trusted: dict[int, Mount] | None, depth: int) -> str | None:
        """Judge a directory or file that another file system is stacked on."""
        mount = None
        if trusted is not None and depth < _MAX_STACK_DEPTH and path.startswith(b"/"):
            # the last mount on a mount point hides the others
            for candidate in trusted.values():
                if _is_within(path, candidate.point) and (mount is None or len(candidate.point) >= len(mount.point)):
                    mount = candidate
        if trusted is None or mount is None:
            return f"the file is on {path.decode(errors='backslashreplace')}, whose file system no mount shows"
        return self.judge(mount, trusted, depth + 1)

    def _backing_files(self, mount: Mount) -> list[bytes]:
        """Return the files behind loop devices. A network block device yields a path that is on no mount."""
        if mount.kind == b"btrfs":
            # its device number is anonymous, and it may span several disks; this is the one that was mounted
            disks = [f"{self._devices}/class/block/{posixpath.basename(posixpath.realpath(os.fsdecode(mount.source)))}"]
        elif mount.device.startswith(b"0:"):
            return []
        else:
            disks = [f"{self._devices}/dev/block/{mount.device.decode()}"]
        files = []
        for disk in disks:
            real = posixpath.realpath(disk)
            with suppress(OSError):
                disks += [f"{real}/slaves/{slave}" for slave in os.listdir(f"{real}/slaves")]
            # a partition's is in its disk's directory
            for directory in (real, posixpath.dirname(real)):
                with suppress(OSError), open(f"{directory}/loop/backing_file", "rb") as file:
                    files.append(file.read().rstrip(b"\n"))
            if "/nbd" in real:
                files.append(b"a network block device")
        return files


def _mount_of(pid: int, mount_id: int) -> Mount | None:
    """Return a mount that a process sees."""
    with suppress(OSError):
        return find(f"/proc/{pid}/mountinfo", mount_id)
    return None


def _is_mounted_by_root(mount: Mount, trusted: dict[int, Mount] | None) -> bool:
    """Only FUSE is checked: users can mount it, and whatever else has FS_USERNS_MOUNT cannot block."""
    if not mount.kind.startswith(b"fuse"):
        return True
    return trusted is not None and b"user_id=0" in mount.options.split(b",")


def _untrusted(kind: str) -> str:
    return (
        f"the file is on {kind}, whose server could block every fork on this host while a site is armed; "
        f'set [filesystems] arm = ["{kind}"] in the configuration to allow it'
    )


def _is_within(path: bytes, point: bytes) -> bool:
    return (path.rstrip(b"/") + b"/").startswith(point.rstrip(b"/") + b"/")


def _shmem_device() -> int:
    """Return the device of the kernel's internal shmem mount (memfds, SysV shared memory, /dev/zero), which no mount
    table lists.
    """
    descriptor = os.memfd_create("stapsdt-device", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


class _Table:
    """A mountinfo file, reread when the kernel reports a change; empty if it cannot be read."""

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
        """Return the mounts by id, in the file's order."""
        if self._changes.poll(0):
            self._read()
        return self._mounts

    def _read(self) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with open(self._descriptor, "rb", closefd=False) as file:
            self._mounts = {mount.id: mount for mount in parse(file.read())}
