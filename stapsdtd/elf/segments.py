"""Translate addresses in notes to file offsets, which uprobes are placed by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from stapsdtd.elf.container import PF_W, PF_X, Segment
from stapsdtd.elf.notes import UnusableNoteError
from stapsdtd.model import SEMAPHORE_BYTES, FileOffset, Vaddr


class LoadSegments:
    """The PT_LOAD segments, searched by address."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._segments = sorted((s for s in segments if s.memory_size or s.file_size), key=lambda s: s.vaddr)
        self._starts = [segment.vaddr for segment in self._segments]
        self._ends = [segment.vaddr + max(segment.memory_size, segment.file_size) for segment in self._segments]
        self._furthest_ends = list(accumulate(self._ends, max))

    def site_offset(self, location: Vaddr) -> tuple[FileOffset, int]:
        """Return the location's file offset and the number of bytes of its segment that the file has from there on."""
        segment = self._segment_at(location, "location")
        # the kernel arms only mappings that are executable and not writable (valid_vma in kernel/events/uprobes.c)
        if not segment.flags & PF_X or segment.flags & PF_W:
            raise UnusableNoteError(f"the location {location:#x} is not in a code segment")
        return self._offset(segment, location, 1, "location")

    def semaphore_offset(self, semaphore: Vaddr) -> FileOffset:
        """Return the semaphore's file offset.

        It must be in the file-backed part. The rest of the last page is mapped from the file too, but the loader clears
        it after the mmap at which the kernel increments the counter; pages beyond are anonymous.
        """
        segment = self._segment_at(semaphore, "semaphore")
        if not segment.flags & PF_W:
            raise UnusableNoteError(f"the semaphore {semaphore:#x} is not in a writable segment")
        offset, _ = self._offset(segment, semaphore, SEMAPHORE_BYTES, "semaphore")
        # uprobe_register() rejects others with EINVAL, since a counter must not span two pages
        if offset % SEMAPHORE_BYTES or offset == 0:
            raise UnusableNoteError(f"the semaphore's file offset {offset:#x} is not a multiple of 2, or is 0")
        return offset

    def _segment_at(self, address: Vaddr, kind: str) -> Segment:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or self._furthest_ends[index] <= address:
            raise UnusableNoteError(f"the {kind} {address:#x} is in no load segment")
        if index and self._furthest_ends[index - 1] > address:
            raise UnusableNoteError(f"the {kind} {address:#x} is in overlapping load segments")
        return self._segments[index]

    @staticmethod
    def _offset(segment: Segment, address: Vaddr, length: int, kind: str) -> tuple[FileOffset, int]:
        backed = segment.vaddr + segment.file_size - address
        if backed < length:
            raise UnusableNoteError(
                f"the {kind} {address:#x} is in memory not backed by the file, out of the kernel's reach"
            )
        return FileOffset(segment.offset + address - segment.vaddr), backed
