"""inotify(7): which files are written to. The standard library has none of it."""

from __future__ import annotations

import ctypes
import os
import struct

_IN_MODIFY, _IN_Q_OVERFLOW, _IN_IGNORED = 0x2, 0x4000, 0x8000
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """Tells of files, by numbers, that somebody wrote to. Raises OSError where the host lets have no more of them."""

    def __init__(self) -> None:
        self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._descriptor

    def add(self, path: str) -> int:
        """Watch a file; answer its number, which is the same for the same file."""
        return _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY))

    def remove(self, number: int) -> None:
        """It may be gone, and its number with it."""
        _libc.inotify_rm_watch(self._descriptor, number)

    def read(self) -> set[int] | None:
        """Answer which files were written to since the last time; None for all, where they were too many to be told."""
        found: set[int] = set()
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                number, mask, _, name_bytes = _EVENT.unpack_from(data, at)
                at += _EVENT.size + name_bytes
                if mask & _IN_Q_OVERFLOW:
                    return None
                if not mask & _IN_IGNORED:
                    found.add(number)

    def close(self) -> None:
        os.close(self._descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
