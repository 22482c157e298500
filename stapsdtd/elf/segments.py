"""Translate addresses in notes to file offsets, which uprobes are placed by."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from stapsdtd.elf.container import PF_W, PF_X, Segment
from stapsdtd.elf.notes import UnusableNoteError
from stapsdtd.model import SEMAPHORE_BYTES, FileOffset, Vaddr

_CLEARED = (
    "its semaphore is in .bss, which the loader clears after the kernel has counted there: a program that starts would "
    'read 0, and its breakpoint would stay; give the semaphore __attribute__((section(".probes")))'
)
"""The rest of the last page that the file backs is mapped from the file, but cleared after the mmap at which the kernel
increments the counter. update_ref_ctr() then refuses to decrement 0 (kernel/events/uprobes.c). A link for one running
process does not help: when that executes the file or loads the library again, the kernel arms the new mapping, too.
"""

_PROTECTED = (
    "its semaphore is in data that the loader makes read-only (RELRO), where the kernel does not count: a running "
    'program would see no change; give the semaphore __attribute__((section(".probes")))'
)
"""valid_ref_ctr_vma() in kernel/events/uprobes.c takes writable mappings only."""


class Semaphore(NamedTuple):
    """offset: None if the file has none. refused: why the kernel cannot count there."""

    offset: FileOffset | None
    refused: str | None = None


class LoadSegments:
    """The PT_LOAD segments, searched by address. protected: the PT_GNU_RELRO ones, parts of these."""

    def __init__(self, segments: Iterable[Segment], protected: Sequence[Segment] = ()) -> None:
        # the loader protects the last one, in whole pages: _dl_protect_relro in glibc's elf/dl-reloc.c
        self._protected = [
            range(_page_start(each.vaddr), _page_start(each.vaddr + each.memory_size)) for each in protected[-1:]
        ]
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
        backed = segment.vaddr + segment.file_size - location
        if backed < 1:
            raise UnusableNoteError(_not_backed("location", location))
        return FileOffset(segment.offset + location - segment.vaddr), backed

    def semaphore(self, address: Vaddr, file_size: int) -> Semaphore:
        """Return where the file has a note's semaphore, and whether the kernel can count there."""
        try:
            segment = self._segment_at(address, "semaphore")
        except UnusableNoteError as error:
            return Semaphore(None, error.reason)
        offset = FileOffset(segment.offset + address - segment.vaddr)
        if not segment.flags & PF_W:
            return Semaphore(None, f"the semaphore {address:#x} is not in a writable segment")
        end, backed_end = address + SEMAPHORE_BYTES, segment.vaddr + segment.file_size
        mapped_end = _page_start(backed_end + mmap.PAGESIZE - 1) if segment.file_size else segment.vaddr
        if end > mapped_end:
            return Semaphore(None, _not_backed("semaphore", address))
        # uprobe_register() rejects others with EINVAL, since a counter must not span two pages
        if offset % SEMAPHORE_BYTES or offset == 0:
            return Semaphore(None, f"the semaphore's file offset {offset:#x} is not a multiple of 2, or is 0")
        is_in_file = offset + SEMAPHORE_BYTES <= file_size
        if end > backed_end:
            return Semaphore(offset if is_in_file else None, _CLEARED)
        if not is_in_file:
            return Semaphore(None, f"the semaphore's file offset {offset:#x} is beyond the file's end")
        is_protected = any(address in pages for pages in self._protected)
        return Semaphore(offset, _PROTECTED if is_protected else None)

    def _segment_at(self, address: Vaddr, kind: str) -> Segment:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or self._furthest_ends[index] <= address:
            raise UnusableNoteError(f"the {kind} {address:#x} is in no load segment")
        if index and self._furthest_ends[index - 1] > address:
            raise UnusableNoteError(f"the {kind} {address:#x} is in overlapping load segments")
        return self._segments[index]


def _page_start(address: int) -> int:
    return address // mmap.PAGESIZE * mmap.PAGESIZE


def _not_backed(kind: str, address: Vaddr) -> str:
    return f"the {kind} {address:#x} is in memory not backed by the file, out of the kernel's reach"
