"""What an ELF file says of its probes: a file goes in, a `model.ParsedObject` comes out.

    file ──► container: header, sections, segments, all bounded
               ├─► build_id
               └─► notes: the payload of .note.stapsdt ──► operands
                     └─► sites: prelink, segments (address ──► file offset), nops ──► symbols: function

The file is hostile until proven otherwise: one bad note costs that note and becomes a `Problem`, a bad file
raises `ObjectUnreadableError`, and neither costs memory or time beyond the bounds that stand beside the code.
"""

from __future__ import annotations

from typing import BinaryIO

from stapsdtd.elf.build_id import read_build_id
from stapsdtd.elf.container import open_container
from stapsdtd.elf.sites import read_sites
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import ParsedObject

__all__ = ["parse_object"]


def parse_object(file: BinaryIO) -> ParsedObject:
    """Reads a seekable binary file; whatever that contains, raises ObjectUnreadableError and nothing else.

    An object without probes has no sites and no problems.
    """
    try:
        container = open_container(file)
        sites, problems = read_sites(container)
        return ParsedObject(container.architecture, read_build_id(container), sites, problems)
    except OSError as error:
        raise ObjectUnreadableError(f"reading failed: {error.strerror or error}") from error
    except MemoryError as error:
        raise ObjectUnreadableError("not enough memory to read it") from error
