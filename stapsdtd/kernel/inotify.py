"""inotify(7), which the standard library lacks: report which files are written to, and what changes in directories."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

from stapsdtd.kernel.host_calls import INOTIFY

_IN_MODIFY, _IN_ATTRIB, _IN_CLOSE_WRITE, _IN_MOVED_FROM, _IN_MOVED_TO = 0x2, 0x4, 0x8, 0x40, 0x80
_IN_CREATE, _IN_DELETE, _IN_Q_OVERFLOW, _IN_IGNORED = 0x100, 0x200, 0x4000, 0x8000
_IN_ONLYDIR, _IN_EXCL_UNLINK, _IN_ISDIR = 0x0100_0000, 0x0400_0000, 0x4000_0000
WRITES = _IN_MODIFY
"""Of a file."""
ENTRIES = (
    _IN_ATTRIB
    | _IN_CLOSE_WRITE
    | _IN_MOVED_FROM
    | _IN_MOVED_TO
    | _IN_CREATE
    | _IN_DELETE
    | _IN_ONLYDIR
    | _IN_EXCL_UNLINK
)
"""Of a directory: what comes, goes, or has been written to."""
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Event(NamedTuple):
    """watch: the watch descriptor. name: what it is about in a directory, or empty. is_over: the kernel dropped the
    watch.
    """

    watch: int
    name: str
    is_directory: bool
    is_over: bool


class Inotify:
    """Reports by watch descriptor. Raises OSError if the host's limit of instances is reached."""

    def __init__(self, what: int = WRITES) -> None:
        """what: WRITES or ENTRIES."""
        self._what = what
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "files (inotify_init1)")

    def fileno(self) -> int:
        return self._descriptor

    def add(self, path: str) -> int:
        """Watch a file and return its watch descriptor, which is the same for the same file."""
        return _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(path), self._what), path)

    def remove(self, watch: int) -> None:
        """Stop watching a file. The kernel may have removed the watch already."""
        _libc.inotify_rm_watch(self._descriptor, watch)

    def read(self) -> set[int] | None:
        """Return the watches of files written to since the last call; None if events were lost: any may be."""
        events = self.events()
        return None if events is None else {event.watch for event in events if not event.is_over}

    def events(self) -> list[Event] | None:
        """Return what happened since the last call; None if events were lost: anything may have."""
        events: list[Event] = []
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return events
            offset = 0
            while offset < len(data):
                watch, mask, _, name_bytes = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size
                name = os.fsdecode(data[offset : offset + name_bytes].rstrip(b"\0"))
                offset += name_bytes
                if mask & _IN_Q_OVERFLOW:
                    return None
                events.append(Event(watch, name, bool(mask & _IN_ISDIR), bool(mask & _IN_IGNORED)))

    def close(self) -> None:
        os.close(self._descriptor)


def _checked(result: int, subject: str) -> int:
    if result < 0:
        raise INOTIFY.refused(subject, ctypes.get_errno())
    return result
