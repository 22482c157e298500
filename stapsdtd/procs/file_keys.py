"""Keys of files, by which objects are recognized, and whether a path still leads to an object."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.overlays import real_file
from stapsdtd.kernel.reach import FileStatus, status_of
from stapsdtd.model import Mapping, Object, ObjectKey


def key_of_mapped(descriptor: int, pid: int, mapping: Mapping, way: str) -> ObjectKey | None:
    """Return the key of the file that is open, or None if it is not the mapped one. A file of an overlay has its
    layer's.

    map_files leads to what is at these addresses now, which after an exec can be another file. Some file systems show
    another inode in maps than in stat (overlayfs before Linux 6.8), so there the path may do instead.
    """
    status = status_of(descriptor)
    if not status.is_regular:
        return None
    if "/map_files/" in way:
        is_mapped = status.st_ino == mapping.inode or procfs.shown_link(f"/proc/self/fd/{descriptor}") == mapping.path
    else:
        is_mapped = (status.st_dev, status.st_ino) == (mapping.dev, mapping.inode)
    return _key_of(real_file(pid, mapping.path, status) or status) if is_mapped else None


def key_of_open(descriptor: int, pid: int, path: str) -> ObjectKey:
    """Return the key of a file that is open, which process pid has at path. A file of an overlay has its layer's."""
    status = status_of(descriptor)
    return _key_of(real_file(pid, path, status) or status)


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
    file = obj.key.dev, obj.key.inode
    return any(key and key != obj.key and (key.dev, key.inode) == file for key in _keys_at(obj.path, filesystems))


def _keys_at(path: str, filesystems: Filesystems) -> Iterator[ObjectKey | None]:
    """Yield the keys of the files that a path leads to in this mount namespace and in the first process's, which no
    sandbox hides; None if that is not known at the moment.
    """
    for pid, root in (os.getpid(), ""), (filesystems.first_pid, f"/proc/{filesystems.first_pid}/root"):
        try:
            status = filesystems.status_at(f"{root}{path}")
        except (BlockingIOError, ObjectPendingError):
            yield None
        except OSError:
            continue
        else:
            yield _key_of(real_file(pid, path, status) or status)


def _key_of(status: FileStatus) -> ObjectKey:
    return ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
