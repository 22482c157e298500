"""What an ELF file says of its probes: a file goes in, a `model.ParsedObject` comes out.

    file ──► container: header, sections, segments, all bounded
               ├─► build_id
               └─► notes: the payload of .note.stapsdt ──► operands
                     └─► sites: prelink, segments (address ──► file offset), nops ──► symbols: function

The file is hostile until proven otherwise: one bad note costs that note and becomes a `Problem`, a bad file
raises `ObjectUnreadableError`, and neither costs memory or time beyond the bounds that stand beside the code.
"""

from __future__ import annotations

import contextlib
from typing import BinaryIO

from stapsdtd.elf.build_id import read_build_id
from stapsdtd.elf.container import PT_LOAD, Container, open_container
from stapsdtd.elf.read_only import read_only_segments
from stapsdtd.elf.sites import read_sites
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import ParsedObject

__all__ = ["parse_object"]


def parse_object(file: BinaryIO, debug_file: BinaryIO | None = None) -> ParsedObject:
    """Reads a seekable binary file; whatever that contains, raises ObjectUnreadableError and nothing else.

    An object without probes has no sites and no problems. debug_file: where symbols are that the file was stripped of;
    one that cannot be read, or belongs to another file, is as good as none.
    """
    try:
        container = open_container(file)
        build_id = read_build_id(container)
        debug = _debug_container(debug_file, container, build_id) if debug_file is not None else None
        sites, problems, lacks_symbols = read_sites(container, debug)
        # most files have no probes, and nobody asks for their segments
        read_only = read_only_segments(container) if sites else ()
        return ParsedObject(container.architecture, build_id, sites, problems, lacks_symbols, read_only)
    except OSError as error:
        raise ObjectUnreadableError(f"reading failed: {error.strerror or error}") from error
    except MemoryError as error:
        raise ObjectUnreadableError("not enough memory to read it") from error


def _debug_container(debug_file: BinaryIO, container: Container, build_id: str | None) -> Container | None:
    """None unless the two are of one build and have their addresses in common, which prelink changes in one alone."""
    with contextlib.suppress(ObjectUnreadableError):
        debug = open_container(debug_file)
        if build_id is not None and read_build_id(debug) == build_id and _addresses(debug) == _addresses(container):
            return debug
    return None


def _addresses(container: Container) -> list[int]:
    return [segment.vaddr for segment in container.segments(PT_LOAD)]
