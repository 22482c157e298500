"""Kernel functions that lead to each other, and what each of their sites is to that.

vfs_write, ext4_file_write_iter      fbt:vmlinux:vfs_write:entry              entered   0
                                     fbt:ext4:ext4_file_write_iter:return     returned  1
                                     fbt:vmlinux:folio_wait_writeback:entry   within    1
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from stapsdtd.functions.probes import ENTRY, PROVIDER, RETURN
from stapsdtd.model import Site

MAX_LENGTH = 16
"""As MAX_LINKS in bpf/stapsdt.h."""


class LinkKind(IntEnum):
    """What a hit is to a chain; the values are those of bpf/stapsdt.h."""

    ENTERED = 0
    RETURNED = 1
    WITHIN = 2


@dataclass(frozen=True, slots=True)
class Link:
    """position: of the function in the chain; of the last one for what happens within all of them."""

    kind: LinkKind
    position: int


@dataclass(frozen=True, slots=True)
class Chain:
    """functions: their modules and names, the first of which leads to the second one, and so on.

    A module is empty where it is not known yet.
    """

    functions: tuple[tuple[str, str], ...]

    def link_of(self, module: str, site: Site) -> Link:
        """Return what the hits of a site are. module: the path of its object."""
        named = (module, site.function or "")
        if site.provider == PROVIDER and named in self.functions:
            position = self.functions.index(named)
            if site.name == ENTRY:
                return Link(LinkKind.ENTERED, position)
            if site.name == RETURN:
                return Link(LinkKind.RETURNED, position)
        return Link(LinkKind.WITHIN, len(self.functions) - 1)
