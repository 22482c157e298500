"""Files that clients name, also those that no process maps yet. `file_opener` opens them.

From then on such a file is reached by its descriptor alone, whatever the path leads to by then.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import partial

from stapsdtd.errors import ObjectForeignError, ObjectGoneError
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.reach import status_of
from stapsdtd.model import Object, ObjectKey, ParsedObject
from stapsdtd.procs.file_keys import identify_open, open_now
from stapsdtd.procs.objects import Parse, is_same


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who names files. client: as known to others; its requests wait for each other.

    uid: None for the rights of this process. groups: one at least, unless uid is None. pid: whose files the parser may
    read in the same sandbox.
    """

    client: str
    uid: int | None
    groups: frozenset[int]
    pid: int

    @property
    def user(self) -> int:
        return os.geteuid() if self.uid is None else self.uid


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class NamedFile:
    """A file with notes, open for reading until nobody refers to this any more.

    path: as in maps. viewer: the process that has it there. credentials: of who named it.
    """

    descriptor: int
    path: str
    viewer: int
    key: ObjectKey
    parsed: ParsedObject
    credentials: Credentials

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def notes(self) -> int:
        return len(self.parsed.sites) + len(self.parsed.problems)

    @property
    def is_deleted(self) -> bool:
        return status_of(self.descriptor).st_nlink == 0

    @property
    def is_unchanged(self) -> bool:
        """Whether it has been neither deleted nor written to."""
        status = status_of(self.descriptor)
        return status.st_nlink > 0 and (status.st_size, status.st_mtime_ns) == (self.key.size, self.key.mtime_ns)


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """paths: of the files, and of directories whose files are meant, as in maps. unusable: expected paths, and why."""

    files: tuple[NamedFile, ...]
    paths: frozenset[str]
    unusable: tuple[tuple[str, str], ...] = ()


NO_FILES = NamedFiles((), frozenset())


def open_named(obj: Object, file: NamedFile, parse: Parse, filesystems: Filesystems) -> int:
    """Open a named file anew, if it still is the object.

    Raises ObjectGoneError, ObjectPendingError if that is known later, and ObjectForeignError as `open_object` does.
    """
    if reason := filesystems.why_not(file.descriptor, file.viewer):
        raise ObjectForeignError(reason)
    descriptor = open_now(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        key = identify_open(descriptor, file.viewer, file.path, filesystems).key
        credentials = file.credentials
        if is_same(descriptor, key, obj, partial(parse, pid=credentials.pid, owner=credentials.user)):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    raise ObjectGoneError(obj.path)
