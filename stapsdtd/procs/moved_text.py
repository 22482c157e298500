"""Find text that a process does not execute from its file.

    5581b0c00000-5581b0c01000 r--p 00000000 fe:00 1835043    /usr/bin/php     lines of /proc/PID/maps: between two parts
    5581b0c01000-5581b0e00000 r-xp 00001000 fe:00 1835043    /usr/bin/php     of the file's text is a copy of a third
    5581b0e00000-5581b1600000 r-xp 00000000 00:00 0
    5581b1600000-5581b16fe000 r-xp 00a00000 fe:00 1835043    /usr/bin/php

Programs do that to have their text in huge pages: Node.js (`--use-largepages`), PHP (`opcache.huge_code_pages`), and
those that use Intel's iodlr, libhugetlbfs or BOLT's `--hugify`. The kernel patches pages of the file alone. What counts
is the address where a site has to be, by the segment that it is in and where the process mapped any text of the file:
executable memory elsewhere is some JIT's, and a segment that was unmapped is not executed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate
from mmap import PAGESIZE
from typing import NamedTuple

from stapsdtd.kernel.procfs import Region
from stapsdtd.model import Mapping, ReadOnlySegment, Site
from stapsdtd.runtime.slices import Turn

_ANONYMOUS_HUGE_PAGES = "/anon_hugepage"
"""The kernel's name for what mmap(MAP_ANONYMOUS | MAP_HUGETLB) maps (fs/hugetlbfs)."""


class Moved(NamedTuple):
    """Sites whose text a process executes from elsewhere. memory: from what, for people."""

    memory: str
    sites: tuple[Site, ...]


def out_of(sites: Iterable[Site], mapping: Mapping, mappings: Iterable[Mapping]) -> list[Site]:
    """Return the sites of a file that no executable mapping of a process has. mapping: one of the file."""
    own = sorted(
        (each.file_offset, each.file_offset + each.end - each.start)
        for each in mappings
        if (each.dev, each.inode) == (mapping.dev, mapping.inode)
    )
    begins = [begin for begin, _ in own]
    # the furthest that any mapping which begins no later reaches
    ends = list(accumulate((end for _, end in own), max))
    return [site for site in sites if not _is_within(site.site_offset, begins, ends)]


def moved(
    sites: Iterable[Site], segments: Sequence[ReadOnlySegment], mapping: Mapping, regions: Sequence[Region]
) -> Generator[None, None, list[Moved]]:
    """Return, in steps, which of the sites that no executable mapping has are executed from elsewhere.

    segments: the file's. mapping: an executable one of the file, as it was or is. regions: what the process maps now.
    """
    own = {each.start for each in regions if (each.dev, each.inode) == (mapping.dev, mapping.inode)}
    if not own:
        # it is not loaded any more, and its addresses may be another's
        return []
    biases = _biases(mapping, segments)
    begins = [each.start for each in regions]
    found: dict[str, list[Site]] = {}
    turn = Turn()
    for site in sites:
        if turn.is_over:
            yield
            turn.begin()
        vaddrs = [each.vaddr + site.site_offset - each.offset for each in segments if _has(each, site.site_offset)]
        for address in (bias + vaddr for bias in biases for vaddr in vaddrs):
            region = regions[bisect_right(begins, address) - 1]
            if region.start <= address < region.end and "x" in region.permissions and region.start not in own:
                found.setdefault(_name_of(region), []).append(site)
                break
    return [Moved(memory, tuple(some)) for memory, some in found.items()]


def _is_within(offset: int, begins: Sequence[int], ends: Sequence[int]) -> bool:
    position = bisect_right(begins, offset)
    return position > 0 and offset < ends[position - 1]


def _biases(mapping: Mapping, segments: Iterable[ReadOnlySegment]) -> set[int]:
    """Return how far from its addresses in the file the file may be loaded.

    Of a page that two segments share, the mapping may be either's.
    """
    return {
        mapping.start - (each.vaddr - each.offset + mapping.file_offset)
        for each in segments
        if each.offset // PAGESIZE * PAGESIZE <= mapping.file_offset < each.offset + each.size
    }


def _has(segment: ReadOnlySegment, offset: int) -> bool:
    return segment.offset <= offset < segment.offset + segment.size


def _name_of(region: Region) -> str:
    if not region.is_file:
        return "anonymous memory"
    return "anonymous huge pages" if region.path.startswith(_ANONYMOUS_HUGE_PAGES) else region.path
