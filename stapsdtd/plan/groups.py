"""Partitions sites into groups, in each of which the low bits of the instruction pointer identify the site.

    offsets 0x10c4 0x11f0 0x30c4 ──► group 0: 0x10c4 0x11f0    group 1: 0x30c4

A segment is mapped at a multiple of the page size, so the low 12 bits of an address are those of the file offset in
every process. They are distinct within a group, so (group, low bits) identifies a site without any load address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PAGE_BITS = 12
"""Of the smallest page of any architecture; addresses in larger pages agree in these bits, too."""


@dataclass(frozen=True, slots=True)
class Window:
    """The bits of an address that distinguish a group's sites: `bits` of them, from bit `shift` on."""

    shift: int
    bits: int

    @property
    def entries(self) -> int:
        return 1 << self.bits

    def entry(self, address: int) -> int:
        return address >> self.shift & self.entries - 1


@dataclass(frozen=True, slots=True)
class Partition:
    """Sites that can share a group. members: their positions in the sequence that was partitioned."""

    window: Window
    members: tuple[int, ...]


def partition_by_page_offset(offsets: Sequence[int]) -> list[Partition]:
    """Put each file offset into the first partition without an equal page offset."""
    partitions: list[dict[int, int]] = []
    for position, offset in enumerate(offsets):
        page_offset = offset & (1 << _PAGE_BITS) - 1
        partition = next((partition for partition in partitions if page_offset not in partition), None)
        if partition is None:
            partitions.append(partition := {})
        partition[page_offset] = position
    return [Partition(_window(list(partition)), tuple(partition.values())) for partition in partitions]


def _window(page_offsets: list[int]) -> Window:
    """Return the smallest window in which all are distinct: a single site needs no bits."""
    for bits in range((len(page_offsets) - 1).bit_length(), _PAGE_BITS):
        for shift in range(_PAGE_BITS - bits + 1):
            window = Window(shift, bits)
            if len({window.entry(page_offset) for page_offset in page_offsets}) == len(page_offsets):
                return window
    return Window(0, _PAGE_BITS)
