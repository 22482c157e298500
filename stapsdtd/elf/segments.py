"""From an address in the note to the offset in the file, which uprobes are addressed by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from stapsdtd.elf.container import PF_W, PF_X, Segment
from stapsdtd.elf.notes import UnusableNoteError
from stapsdtd.model import FileOffset, Vaddr

SEMAPHORE_BYTES = 2


class LoadSegments:
    """The PT_LOAD segments, searched by address in their file-backed part."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._segments = sorted((s for s in segments if s.memory_size or s.file_size), key=lambda s: s.vaddr)
        self._starts = [segment.vaddr for segment in self._segments]
        self._ends = [segment.vaddr + max(segment.memory_size, segment.file_size) for segment in self._segments]
        self._furthest_ends = list(accumulate(self._ends, max))

    def site_offset(self, location: Vaddr) -> tuple[FileOffset, int]:
        """Where the file has the location, and how many bytes of the segment it has from there on."""
        segment = self._segment_at(location, "location")
        # The kernel arms executable mappings that are not writable (valid_vma in kernel/events/uprobes.c).
        if not segment.flags & PF_X or segment.flags & PF_W:
            raise UnusableNoteError(f"the location {location:#x} is not in a segment of code")
        return self._offset(segment, location, 1, "location")

    def semaphore_offset(self, semaphore: Vaddr) -> FileOffset:
        """Where the file has the semaphore.

        It must be within the file-backed part. The rest of that part's last page is mapped from the file too,
        but the loader clears it after the mmap at which the kernel raises the counter; beyond is no file.
        """
        segment = self._segment_at(semaphore, "semaphore")
        if not segment.flags & PF_W:
            raise UnusableNoteError(f"the semaphore {semaphore:#x} is not in a writable segment")
        offset, _ = self._offset(segment, semaphore, SEMAPHORE_BYTES, "semaphore")
        # uprobe_register() refuses others with EINVAL, since a counter must not span two pages.
        if offset % SEMAPHORE_BYTES or offset == 0:
            raise UnusableNoteError(f"the semaphore's file offset {offset:#x} is not a multiple of 2, or is 0")
        return offset

    def _segment_at(self, address: Vaddr, what: str) -> Segment:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or self._furthest_ends[index] <= address:
            raise UnusableNoteError(f"the {what} {address:#x} is in no load segment")
        if index and self._furthest_ends[index - 1] > address:
            raise UnusableNoteError(f"the {what} {address:#x} is in a load segment that another one overlaps")
        return self._segments[index]

    @staticmethod
    def _offset(segment: Segment, address: Vaddr, length: int, what: str) -> tuple[FileOffset, int]:
        backed = segment.vaddr + segment.file_size - address
        if backed < length:
            raise UnusableNoteError(
                f"the {what} {address:#x} is in memory that the file does not back, out of the kernel's reach"
            )
        return FileOffset(segment.offset + address - segment.vaddr), backed
