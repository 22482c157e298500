"""Reads constants that a process has never touched from its file instead.

A string that only the probe refers to lies in a page that the program itself never reads. So the page is not in memory
at the hit, which must not wait for it. If it is mapped without write permission, it cannot differ from the file.

    distance of the text from the instruction pointer ──site_vaddr──► vaddr ──segment──► file offset
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stapsdtd.events.columns import U64, Bools, shortened
from stapsdtd.model import FileOffset, ReadOnlySegment

_WORD = 1 << 64
_READ_AHEAD_BYTES = 4 << 20
_NOT_NOW = frozenset({errno.EAGAIN})
_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})


class FileCalls(Protocol):
    """Those of the module os."""

    def preadv(self, fd: int, buffers: list[bytearray], offset: int, flags: int, /) -> int: ...

    def pread(self, fd: int, length: int, offset: int, /) -> bytes: ...

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int, /) -> None: ...


class ReadOnlyFile:
    """The read-only segments of an object's file."""

    def __init__(self, descriptor: int, segments: Sequence[ReadOnlySegment], *, calls: FileCalls = os) -> None:
        """descriptor: open until this is not used any more."""
        self._descriptor = descriptor
        self._calls = calls
        self.segments = tuple(segments)

    def read_ahead(self) -> None:
        """Have the kernel begin to read the segments."""
        left = _READ_AHEAD_BYTES
        for segment in self.segments:
            size = min(segment.size, left)
            left -= size
            if size:
                self._calls.posix_fadvise(self._descriptor, segment.offset, size, os.POSIX_FADV_WILLNEED)

    def read(self, vaddr: int, max_bytes: int) -> bytes:
        """Return the file's bytes from vaddr on, at most to the segment's end; nothing if that would block."""
        for segment in self.segments:
            distance = vaddr - segment.vaddr
            if 0 <= distance < segment.size:
                return self._pread(segment.offset + distance, min(max_bytes, segment.size - distance))
        return b""

    def _pread(self, offset: int, count: int) -> bytes:
        buffer = bytearray(count)
        # a disk error must not cost the other records that are decoded together with this one
        with suppress(OSError):
            try:
                return bytes(buffer[: self._calls.preadv(self._descriptor, [buffer], offset, os.RWF_NOWAIT)])
            except OSError as error:
                if error.errno in _NO_NOWAIT:
                    # a file system without RWF_NOWAIT, such as overlayfs
                    return self._calls.pread(self._descriptor, count, offset)
                if error.errno in _NOT_NOW:
                    self._calls.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_WILLNEED)
        return b""


@dataclass(frozen=True, slots=True)
class SiteConstants:
    """Constants by their distance from a site's instruction, modulo 2**64."""

    file: ReadOnlyFile
    site_vaddr: int

    @classmethod
    def around(cls, file: ReadOnlyFile, site_offset: FileOffset) -> SiteConstants | None:
        """Return None if the site is not in exactly one segment."""
        segments = [each for each in file.segments if each.offset <= site_offset < each.offset + each.size]
        return cls(file, segments[0].vaddr + site_offset - segments[0].offset) if len(segments) == 1 else None

    def has(self, distances: U64) -> Bools:
        """Report for each distance whether a segment has it."""
        vaddrs = distances + np.uint64(self.site_vaddr % _WORD)
        result = np.zeros(len(distances), np.bool_)
        for segment in self.file.segments:
            result |= vaddrs - np.uint64(segment.vaddr % _WORD) < np.uint64(segment.size)
        return result

    def text(self, distance: int, max_bytes: int) -> bytes | None:
        """Return a string without its NUL, cut to max_bytes and marked; None if it cannot be read that far."""
        data = self._read(distance, max_bytes + 1)
        end = data.find(b"\0")
        if end >= 0:
            return data[:end]
        return shortened(data, max_bytes) if len(data) > max_bytes else None

    def raw(self, distance: int, byte_count: int) -> bytes | None:
        data = self._read(distance, byte_count)
        return data if len(data) == byte_count else None

    def _read(self, distance: int, max_bytes: int) -> bytes:
        return self.file.read((distance + self.site_vaddr) % _WORD, max_bytes)
