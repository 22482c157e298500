"""Parse the probes of an ELF file into a `model.ParsedObject`.

    file ──► container: header, sections, segments, all bounded
               ├─► build_id
               └─► notes: the payload of .note.stapsdt ──► operands
                     └─► sites: prelink, segments (address ──► file offset), nops ──► symbols: function

Files are untrusted: a bad note becomes a `Problem`, a bad file raises `ObjectUnreadableError`, and neither costs memory
or time beyond the limits given beside the code.
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
    """Parse a seekable binary file. Raises ObjectUnreadableError, and nothing else, whatever it contains.

    An object without probes has no sites and no problems. debug_file: has the symbols stripped from the file; ignored
    if it is unreadable or belongs to another file.
    """
    try:
        container = open_container(file)
        build_id = read_build_id(container)
        debug = _debug_container(debug_file, container, build_id) if debug_file is not None else None
        sites, problems, left_out, lacks_symbols = read_sites(container, debug)
        # most files have no probes and do not need this
        read_only = read_only_segments(container) if sites else ()
        return ParsedObject(container.architecture, build_id, sites, problems, lacks_symbols, read_only, left_out)
    except OSError as error:
        raise ObjectUnreadableError(f"reading failed: {error.strerror or error}") from error
    except MemoryError as error:
        raise ObjectUnreadableError("not enough memory to read it") from error


def _debug_container(debug_file: BinaryIO, container: Container, build_id: str | None) -> Container | None:
    """Return None unless both have the same build-id and the same addresses, which prelink changes in only one."""
    with contextlib.suppress(ObjectUnreadableError):
        debug = open_container(debug_file)
        if build_id is not None and read_build_id(debug) == build_id and _load_vaddrs(debug) == _load_vaddrs(container):
            return debug
    return None


def _load_vaddrs(container: Container) -> list[int]:
    return [segment.vaddr for segment in container.segments(PT_LOAD)]
