"""inotify(7), which the standard library lacks: report which files are written to."""

from __future__ import annotations

import ctypes
import os
import struct

_IN_MODIFY, _IN_Q_OVERFLOW, _IN_IGNORED = 0x2, 0x4000, 0x8000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """Reports writes to files by watch descriptor. Raises OSError if the host's limit of instances is reached."""

    def __init__(self) -> None:
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._descriptor

    def add(self, path: str) -> int:
        """Watch a file and return its watch descriptor, which is the same for the same file."""
        return _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY))

    def remove(self, watch: int) -> None:
        """Stop watching a file. The kernel may have removed the watch already."""
        _libc.inotify_rm_watch(self._descriptor, watch)

    def read(self) -> set[int] | None:
        """Return the watches of files written to since the last call; None if events were lost: any may be."""
        written: set[int] = set()
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return written
            offset = 0
            while offset < len(data):
                watch, mask, _, name_bytes = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size + name_bytes
                if mask & _IN_Q_OVERFLOW:
                    return None
                if not mask & _IN_IGNORED:
                    written.add(watch)

    def close(self) -> None:
        os.close(self._descriptor)


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
