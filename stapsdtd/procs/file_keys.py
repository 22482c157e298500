"""Keys of files, by which objects are recognized, and whether a path still leads to an object.

    stat shows the inode that uprobes compare       most file systems, `Filesystems.shows_inodes`
    /proc/PID/maps shows it                         overlays before Linux 6.8
    a BPF iterator shows it                         overlays, btrfs: `kernel.inodes`
    overlays' layers are looked up by name          where BPF is not to be had: `kernel.overlays`
    it cannot be known                              `ObjectKey.is_certain` is false

This is the only place that decides which of these applies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.host_calls import OPEN_FILE, host_call
from stapsdtd.kernel.inodes import MappedInode, ProcessInodes, inode_reader
from stapsdtd.kernel.overlays import OVERLAY, real_file
from stapsdtd.kernel.reach import FileStatus, status_of
from stapsdtd.model import Mapping, Object, ObjectKey


class Identity(NamedTuple):
    """inode: as the kernel shows it; None if stat or names had to do."""

    key: ObjectKey
    inode: MappedInode | None = None


def identify_mapped(
    descriptor: int, mapping: Mapping, way: str, inodes: ProcessInodes, filesystems: Filesystems
) -> Identity | None:
    """Identify the file that is open, or held, at a descriptor; None if it is not the mapped one.

    inodes: of the process. Raises ObjectPendingError if the process holds the lock of its memory map, and OSError.

    map_files leads to what is at these addresses now, which after an exec can be another file. Some file systems show
    another inode in maps than in stat (overlayfs before Linux 6.8, btrfs), so there the path may do instead.
    """
    status = status_of(descriptor)
    if not status.is_regular:
        return None
    if "/map_files/" in way:
        is_mapped = status.st_ino == mapping.inode or procfs.shown_link(f"/proc/self/fd/{descriptor}") == mapping.path
    else:
        is_mapped = (status.st_dev, status.st_ino) == (mapping.dev, mapping.inode)
    if not is_mapped:
        return None
    if filesystems.shows_inodes(status):
        return _as_shown(status)
    if os.major(mapping.dev):
        # no overlay has a block device's number, so that this is the layer's
        return _by_inode(status, MappedInode(mapping.dev, mapping.inode))
    if inode := inodes.at(mapping.start):
        return _by_inode(status, inode)
    # it has ended, or there is no BPF
    return _reopened(descriptor, status, inodes.thread, mapping.path, filesystems)


def identify_open(descriptor: int, pid: int, path: str, filesystems: Filesystems) -> Identity:
    """Identify a file that is open for reading, which process pid has at path. Raises OSError."""
    status = status_of(descriptor)
    if filesystems.shows_inodes(status):
        return _as_shown(status)
    reader = inode_reader()
    if reader is None:
        return _by_name(descriptor, status, pid, path, filesystems)
    inode = reader.of_open(descriptor)
    return _unknown(status) if inode is None else _by_inode(status, inode)


def _reopened(descriptor: int, status: FileStatus, pid: int, path: str, filesystems: Filesystems) -> Identity:
    """Identify a file that is held by O_PATH. It is not opened if it may not be armed."""
    if inode_reader() is None:
        return _by_name(descriptor, status, pid, path, filesystems)
    if filesystems.why_not(descriptor, pid) is not None:
        return _unknown(status)
    opened = open_now(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return identify_open(opened, pid, path, filesystems)
    finally:
        os.close(opened)


def _by_name(descriptor: int, status: FileStatus, pid: int, path: str, filesystems: Filesystems) -> Identity:
    if real := real_file(pid, path, status, filesystems.first_pid):
        return _as_shown(real)
    return _unknown(status) if filesystems.kind_of(descriptor, pid) in {OVERLAY, ""} else _as_shown(status)


def _as_shown(status: FileStatus) -> Identity:
    return Identity(ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def _by_inode(status: FileStatus, inode: MappedInode) -> Identity:
    return Identity(ObjectKey(inode.dev, inode.number, status.st_size, status.st_mtime_ns, inode.instance), inode)


def _unknown(status: FileStatus) -> Identity:
    return Identity(ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, is_certain=False))


def is_host_file(obj: Object, filesystems: Filesystems) -> bool:
    """Report whether the object's path still leads to it, so that a later process may map it from there.

    A file that was written to meanwhile is another object, though it has the same inode.
    """
    return leads_to(obj, filesystems) is True


def leads_to(obj: Object, filesystems: Filesystems) -> bool | None:
    """Report what is_host_file does, or None if the kernel's cache of names does not know the path at the moment.

    That is so of most deleted files, and for an instant while something is mounted or renamed anywhere on the host.
    """
    keys = list(_keys_at(obj.path, filesystems))
    if obj.key in keys:
        return True
    return None if None in keys and not any(keys) else False


def may_lead_to(key: ObjectKey, path: str, filesystems: Filesystems) -> bool:
    """Report whether a path leads to a file, or the kernel's cache of names does not know at the moment."""
    keys = list(_keys_at(path, filesystems))
    return key in keys or None in keys


def was_written_to(obj: Object, filesystems: Filesystems) -> bool:
    """Report whether the object's path leads to the same file with other content."""
    return any(key and key != obj.key and key.file == obj.key.file for key in _keys_at(obj.path, filesystems))


def _keys_at(path: str, filesystems: Filesystems) -> Iterator[ObjectKey | None]:
    """Yield the keys of the files that a path leads to in this mount namespace and in the first process's, which no
    sandbox hides; None if that is not known at the moment.
    """
    for pid, root in (os.getpid(), ""), (filesystems.first_pid, f"/proc/{filesystems.first_pid}/root"):
        try:
            with filesystems.held(f"{root}{path}") as held:
                status = status_of(held)
                if filesystems.shows_inodes(status) or not status.is_regular:
                    yield _as_shown(status).key
                else:
                    yield _reopened(held, status, pid, path, filesystems).key
        except (BlockingIOError, ObjectPendingError):
            yield None
        except OSError:
            continue


def open_now(path: str, flags: int) -> int:
    """Open without blocking: a process may put a FIFO in a file's place, and opening that would wait for a writer."""
    with host_call(OPEN_FILE):
        return os.open(path, flags | os.O_NONBLOCK)
