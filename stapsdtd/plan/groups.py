"""Sites into groups: few tracefs events of many sites, in which the low bits of the instruction pointer name the site.

    offsets 0x10c4 0x11f0 0x30c4 ──► group 0: 0x10c4 0x11f0    group 1: 0x30c4

A segment is mapped at a multiple of the page, so the low 12 bits of an address are those of the file offset in every
process. No two sites of a group share them, so (group, those bits) names the site without knowing any load address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PAGE_BITS = 12
"""Of the smallest page of any architecture; a larger page's low bits agree as well."""


@dataclass(frozen=True, slots=True)
class Window:
    """The bits of an address that tell a group's sites apart: `bits` of them, from bit `shift` on."""

    shift: int
    bits: int

    @property
    def entries(self) -> int:
        return 1 << self.bits

    def entry(self, address: int) -> int:
        return address >> self.shift & self.entries - 1


@dataclass(frozen=True, slots=True)
class Partition:
    """Positions, in the sequence that was grouped, of sites that can share a group, and what tells them apart."""

    window: Window
    members: tuple[int, ...]


def partition_by_page_offset(offsets: Sequence[int]) -> list[Partition]:
    """Put each file offset into the first group that has room for it."""
    taken: list[dict[int, int]] = []
    for position, offset in enumerate(offsets):
        low = offset & (1 << _PAGE_BITS) - 1
        group = next((group for group in taken if low not in group), None)
        if group is None:
            taken.append(group := {})
        group[low] = position
    return [Partition(_window(list(group)), tuple(group.values())) for group in taken]


def _window(lows: list[int]) -> Window:
    """Take the fewest bits that are distinct: a group of one site needs none."""
    for bits in range((len(lows) - 1).bit_length(), _PAGE_BITS):
        for shift in range(_PAGE_BITS - bits + 1):
            window = Window(shift, bits)
            if len({window.entry(low) for low in lows}) == len(lows):
                return window
    return Window(0, _PAGE_BITS)
