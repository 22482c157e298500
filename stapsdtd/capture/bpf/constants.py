"""Constants that a process has never touched, read from its file instead.

A text that only the probe names lies in a page that the program itself never reads. So the page is not there at the
hit, which must not wait for it. Where the file maps it without write permission, memory cannot differ from the file.

    distance of the text from the instruction pointer ──site_vaddr──► vaddr ──segment──► file offset
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from stapsdtd.events.columns import U64, Bools
from stapsdtd.model import FileOffset, ReadOnlySegment

_WORD = 1 << 64
_READ_AHEAD_BYTES = 4 << 20
_NOT_NOW = frozenset({errno.EAGAIN})
_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


class ReadOnlyFile:
    """An object's file, by a descriptor that outlives this."""

    def __init__(self, descriptor: int, segments: Sequence[ReadOnlySegment]) -> None:
        self._descriptor = descriptor
        self.segments = tuple(segments)

    def read_ahead(self) -> None:
        """Have the kernel begin to read what may be asked for."""
        left = _READ_AHEAD_BYTES
        for segment in self.segments:
            size = min(segment.size, left)
            left -= size
            if size:
                os.posix_fadvise(self._descriptor, segment.offset, size, os.POSIX_FADV_WILLNEED)

    def read(self, vaddr: int, most_bytes: int) -> bytes:
        """Return what the file has there, up to the segment's end; nothing where it would have to be waited for."""
        for segment in self.segments:
            within = vaddr - segment.vaddr
            if 0 <= within < segment.size:
                return self._pread(segment.offset + within, min(most_bytes, segment.size - within))
        return b""

    def _pread(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        # a disk may fail, which must not cost others the records that are decoded with this one
        with suppress(OSError):
            try:
                return bytes(buffer[: os.preadv(self._descriptor, [buffer], offset, os.RWF_NOWAIT)])
            except OSError as error:
                if error.errno in _NO_NOWAIT:
                    # a file system without it, such as overlayfs
                    return os.pread(self._descriptor, count, offset)
                if error.errno in _NOT_NOW:
                    os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_WILLNEED)
        return b""


@dataclass(frozen=True, slots=True)
class SiteConstants:
    """What lies around a site. Distances are from its instruction, modulo 2**64."""

    file: ReadOnlyFile
    site_vaddr: int

    @classmethod
    def around(cls, file: ReadOnlyFile, site_offset: FileOffset) -> SiteConstants | None:
        """Return None where it cannot be told which segment the site is in."""
        within = [each for each in file.segments if each.offset <= site_offset < each.offset + each.size]
        return cls(file, within[0].vaddr + site_offset - within[0].offset) if len(within) == 1 else None

    def has(self, distances: U64) -> Bools:
        """Whether there is anything to be read at each distance."""
        vaddrs = distances + np.uint64(self.site_vaddr % _WORD)
        found = np.zeros(len(distances), np.bool_)
        for segment in self.file.segments:
            found |= vaddrs - np.uint64(segment.vaddr % _WORD) < np.uint64(segment.size)
        return found

    def text(self, distance: int, max_bytes: int) -> bytes | None:
        """Return the text without its NUL, cut to max_bytes; None where it is not there as a whole."""
        data = self._read(distance, max_bytes + 1)
        end = data.find(b"\0")
        if end >= 0:
            return data[:end]
        return data[:max_bytes] if len(data) > max_bytes else None

    def raw(self, distance: int, byte_count: int) -> bytes | None:
        data = self._read(distance, byte_count)
        return data if len(data) == byte_count else None

    def _read(self, distance: int, most_bytes: int) -> bytes:
        return self.file.read((distance + self.site_vaddr) % _WORD, most_bytes)
