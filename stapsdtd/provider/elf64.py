"""Writes little-endian 64-bit ELF shared libraries from their sections.

Addresses equal file offsets throughout, in notes, symbols and headers, and relative to the load address in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

ET_DYN = 3
PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_GNU_STACK = 1, 2, 4, 0x6474E551
PF_X, PF_W, PF_R = 1, 2, 4
SHT_PROGBITS, SHT_STRTAB, SHT_HASH, SHT_DYNAMIC, SHT_NOTE, SHT_DYNSYM = 1, 3, 5, 6, 7, 11
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR = 1, 2, 4
STB_GLOBAL, STT_OBJECT, STT_FUNC = 1, 1, 2
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT = 0, 4, 5, 6, 10, 11
NT_GNU_BUILD_ID = 3

SYMBOL = struct.Struct("<IBBHQQ")
DYNAMIC = struct.Struct("<QQ")

_FILE_HEADER = struct.Struct("<4s5B7xHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_PROGRAM_HEADER_COUNT = 6
"""Three PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_GNU_STACK."""


@dataclass(frozen=True)
class Section:
    """A section and its contents. link is the name of another section; the rest is as in the section header."""

    name: str
    type: int
    flags: int
    body: bytes
    align: int = 1
    link: str = ""
    info: int = 0
    entry_size: int = 0


@dataclass(frozen=True)
class Segment:
    """A part of the file that is mapped: offset and size in bytes, and PF_ flags."""

    offset: int
    size: int
    flags: int


def lay_out(sections: Sequence[Section], page_size: int) -> dict[str, int]:
    """Return the file offset of each section. Sections with different access rights do not share a page."""
    offsets = {}
    end = _FILE_HEADER.size + _PROGRAM_HEADER_COUNT * _PROGRAM_HEADER.size
    flags = SHF_ALLOC
    for section in sections:
        new_segment = section.flags not in (flags, 0)
        offsets[section.name] = align(end, page_size if new_segment else section.align)
        end = offsets[section.name] + len(section.body)
        flags = section.flags
    return offsets


def segments_of(sections: Sequence[Section], offsets: Mapping[str, int]) -> tuple[Segment, ...]:
    """Return the segments that the sections form. The first one starts with the file header."""
    segments: list[Segment] = []
    mapped = (section for section in sections if section.flags & SHF_ALLOC)
    for flags, run in groupby(mapped, key=lambda section: section.flags):
        members = list(run)
        start = offsets[members[0].name] if segments else 0
        end = offsets[members[-1].name] + len(members[-1].body)
        rights = PF_R | (PF_W if flags & SHF_WRITE else 0) | (PF_X if flags & SHF_EXECINSTR else 0)
        segments.append(Segment(start, end - start, rights))
    return tuple(segments)


def write(sections: Sequence[Section], offsets: Mapping[str, int], machine: int, page_size: int) -> bytearray:
    """Return the file. The last section must hold the section names; .dynamic and .note.gnu.build-id must exist."""
    table_offset = align(offsets[sections[-1].name] + len(sections[-1].body), 8)
    content = bytearray(table_offset)
    for section in sections:
        start = offsets[section.name]
        content[start : start + len(section.body)] = section.body
    content += _section_headers(sections, offsets)

    headers = _FILE_HEADER.pack(
        *(b"\x7fELF", 2, 1, 1, 0, 0),  # 64 bits, little-endian, ELF version, System V ABI and its version
        *(ET_DYN, machine, 1),
        *(0, _FILE_HEADER.size, table_offset, 0),  # no entry point, no processor flags
        *(_FILE_HEADER.size, _PROGRAM_HEADER.size, _PROGRAM_HEADER_COUNT),
        *(_SECTION_HEADER.size, len(sections) + 1, len(sections)),
    )
    headers += _program_headers(sections, offsets, page_size)
    content[: len(headers)] = headers
    return content


def strings(texts: Sequence[str]) -> tuple[bytes, list[int]]:
    """Return a string table, which starts with the empty string, and the offset of each text in it."""
    encoded = [f"{text}\0".encode() for text in texts]
    return b"\0" + b"".join(encoded), list(accumulate(map(len, encoded), initial=1))[:-1]


def note(owner: str, kind: int, descriptor: bytes) -> bytes:
    """Return a note, padded to 4 bytes. The sizes in its header do not include the padding."""
    name = f"{owner}\0".encode()
    sizes = struct.pack("<III", len(name), len(descriptor), kind)
    return sizes + _pad(name, 4) + _pad(descriptor, 4)


def align(offset: int, boundary: int) -> int:
    """Round offset up to a multiple of boundary."""
    return -(-offset // boundary) * boundary


def _pad(data: bytes, boundary: int) -> bytes:
    return data.ljust(align(len(data), boundary), b"\0")


def _program_headers(sections: Sequence[Section], offsets: Mapping[str, int], page_size: int) -> bytes:
    sizes = {section.name: len(section.body) for section in sections}
    headers = [
        (PT_LOAD, segment.flags, segment.offset, segment.size, page_size) for segment in segments_of(sections, offsets)
    ]
    headers += [
        (PT_DYNAMIC, PF_R | PF_W, offsets[".dynamic"], sizes[".dynamic"], 8),
        (PT_NOTE, PF_R, offsets[".note.gnu.build-id"], sizes[".note.gnu.build-id"], 4),
        (PT_GNU_STACK, PF_R | PF_W, 0, 0, 16),  # without it, loaders make stacks executable
    ]
    return b"".join(
        _PROGRAM_HEADER.pack(kind, flags, offset, offset, offset, size, size, alignment)
        for kind, flags, offset, size, alignment in headers
    )


def _section_headers(sections: Sequence[Section], offsets: Mapping[str, int]) -> bytes:
    names = [section.name for section in sections]
    indexes = {name: index for index, name in enumerate(["", *names])}
    headers = [bytes(_SECTION_HEADER.size)]
    for section, name_offset in zip(sections, strings(names)[1]):
        offset = offsets[section.name]
        address = offset if section.flags & SHF_ALLOC else 0
        headers.append(
            _SECTION_HEADER.pack(
                *(name_offset, section.type, section.flags, address, offset, len(section.body)),
                *(indexes[section.link], section.info, section.align, section.entry_size),
            )
        )
    return b"".join(headers)
