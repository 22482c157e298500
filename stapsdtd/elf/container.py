"""A bounded view of an ELF file: its header, sections and segments, as far as probes need them.

Unprivileged users choose the file, so every read is bounded, and counts and sizes in the file are checked against its
length before they are used.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.common.utils import struct_parse
from elftools.elf.enums import ENUM_E_MACHINE
from elftools.elf.structs import ELFStructs
from numpy.typing import NDArray

from stapsdtd.arch import ARCHITECTURES
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import FileOffset, Vaddr

ByteOrder = Literal["<", ">"]

SHT_SYMTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 2, 7, 8, 11
PT_LOAD, PT_NOTE, PT_GNU_RELRO = 1, 4, 0x6474E552
PF_X, PF_W = 1, 2

_SHN_XINDEX = 0xFFFF

MAX_SECTIONS = 65_535
MAX_SECTION_NAMES_BYTES = 4 << 20
MAX_SEGMENT_TABLE_BYTES = 65_536
"""The kernel loads no program with more (load_elf_phdrs in fs/binfmt_elf.c), so PN_XNUM need not be handled."""

_ARCHITECTURES = {each.elf: each.name for each in ARCHITECTURES.values()}


class BoundedFile:
    """Limits reads to the file's actual size, so that a claimed length of 4 GiB in a small file costs nothing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)

    def read(self, offset: int, length: int) -> bytes:
        """Return up to length bytes from offset; fewer at the end of the file."""
        if offset >= self.size or length <= 0:
            return b""
        self._file.seek(offset)
        return self._file.read(min(length, self.size - offset)) or b""


class Section(NamedTuple):
    kind: int
    address_vaddr: Vaddr
    offset: FileOffset
    size: int
    link: int
    entry_size: int


class Segment(NamedTuple):
    """A program header. The first file_size bytes are mapped from the file; zeros follow up to memory_size."""

    kind: int
    flags: int
    vaddr: Vaddr
    offset: FileOffset
    file_size: int
    memory_size: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Container:
    """is_fixed: it is loaded at exactly the addresses it specifies (ET_EXEC)."""

    file: BoundedFile
    architecture: str
    word_bytes: int
    byte_order: ByteOrder
    is_fixed: bool
    section_table: NDArray[np.void]
    _section_names: bytes
    _segment_table_at: tuple[FileOffset, int]

    def sections_named(self, name: bytes) -> list[Section]:
        """Return all sections with that name, in the file's order."""
        # several, because names in the string table may share their tails
        name_offsets = set(positions(self._section_names, name + b"\0"))
        if not name_offsets:
            return []
        return [self.section(i) for i, at in enumerate(self.section_table["name"].tolist()) if at in name_offsets]

    def sections_of_kind(self, kind: int) -> list[Section]:
        return [self.section(int(i)) for i in np.flatnonzero(self.section_table["type"] == kind)]

    def section(self, index: int) -> Section:
        _, kind, _, address, offset, size, link, _, _, entry_size = self.section_table[index].item()
        return Section(kind, Vaddr(address), FileOffset(offset), size, link, entry_size)

    def segments(self, kind: int) -> list[Segment]:
        """Return the program headers of that kind. Raises ObjectUnreadableError if the table is truncated."""
        offset, count = self._segment_table_at
        table = _read_table(
            self.file, "program headers", _segment_layout(self.word_bytes, self.byte_order), offset, count
        )
        return [_segment(row) for row in table[table["type"] == kind]]


def _segment(row: np.void) -> Segment:
    kind, flags, vaddr, offset, file_size, memory_size, alignment = (
        int(row[field]) for field in ("type", "flags", "vaddr", "offset", "filesz", "memsz", "align")
    )
    return Segment(kind, flags, Vaddr(vaddr), FileOffset(offset), file_size, memory_size, alignment)


def open_container(file: BinaryIO) -> Container:
    """Read the header and the section table. Raises ObjectUnreadableError if file is not a usable ELF file."""
    bounded = BoundedFile(file)
    ident = bounded.read(0, 64)
    if ident[:4] != b"\x7fELF":
        raise ObjectUnreadableError("not an ELF file")
    if ident[4:5] not in (b"\1", b"\2") or ident[5:6] not in (b"\1", b"\2"):
        raise ObjectUnreadableError("unknown ELF class or byte order")
    word_bytes = 4 * ident[4]
    byte_order: ByteOrder = "<" if ident[5] == 1 else ">"
    header = _parse_header(ident, word_bytes, byte_order)

    sections = _read_sections(bounded, header, word_bytes, byte_order)
    segment_bytes = _segment_layout(word_bytes, byte_order).itemsize
    if header["e_phnum"] and header["e_phentsize"] != segment_bytes:
        raise ObjectUnreadableError(f"program headers of {header['e_phentsize']} bytes")
    if header["e_phnum"] * segment_bytes > MAX_SEGMENT_TABLE_BYTES:
        raise ObjectUnreadableError(f"{header['e_phnum']} program headers, more than the kernel loads")
    return Container(
        bounded,
        _architecture(header["e_machine"], 8 * word_bytes, byte_order),
        word_bytes,
        byte_order,
        header["e_type"] == "ET_EXEC",
        sections,
        _read_section_names(bounded, sections, header["e_shstrndx"]),
        (FileOffset(header["e_phoff"]), header["e_phnum"]),
    )


def _parse_header(ident: bytes, word_bytes: int, byte_order: ByteOrder) -> Mapping[str, Any]:
    # Only pyelftools's header parser is used, because every executable mapping on the host is checked: rejecting
    # libc.so.6, which has no probes, takes 4 ms with ELFFile, its sections and its segments, and 0.05 ms like this.
    try:
        header: Mapping[str, Any] = struct_parse(_structs(word_bytes, byte_order).Elf_Ehdr, io.BytesIO(ident), 0)
    except ELFError as error:
        raise ObjectUnreadableError("the ELF header is truncated") from error
    return header


@functools.cache
def _structs(word_bytes: int, byte_order: ByteOrder) -> Any:
    structs = ELFStructs(little_endian=byte_order == "<", elfclass=8 * word_bytes)
    structs.create_basic_structs()
    return structs


def _architecture(machine: Any, bits: int, byte_order: ByteOrder) -> str:
    name = _ARCHITECTURES.get((machine, bits, byte_order))
    return name or f"machine-{ENUM_E_MACHINE.get(machine, machine)}"


def _read_sections(
    file: BoundedFile, header: Mapping[str, Any], word_bytes: int, byte_order: ByteOrder
) -> NDArray[np.void]:
    layout = _section_layout(word_bytes, byte_order)
    offset, count = header["e_shoff"], header["e_shnum"]
    if offset == 0:
        return np.empty(0, layout)
    if header["e_shentsize"] != layout.itemsize:
        raise ObjectUnreadableError(f"section headers of {header['e_shentsize']} bytes")
    if count == 0:
        # gABI: a count of 0xff00 or more is in the first section header
        count = int(_read_table(file, "section headers", layout, offset, 1)[0]["size"])
    if count > MAX_SECTIONS:
        raise ObjectUnreadableError(f"{count} section headers, more than {MAX_SECTIONS}")
    return _read_table(file, "section headers", layout, offset, count)


def _read_section_names(file: BoundedFile, sections: NDArray[np.void], index: int) -> bytes:
    if index == _SHN_XINDEX and len(sections):
        index = int(sections[0]["link"])
    if not 0 < index < len(sections):
        return b""
    row = sections[index]
    if row["type"] == SHT_NOBITS:
        return b""
    if row["size"] > MAX_SECTION_NAMES_BYTES:
        raise ObjectUnreadableError(f"section names of {row['size']} bytes")
    return file.read(int(row["offset"]), int(row["size"]))


def _read_table(file: BoundedFile, table: str, layout: np.dtype[np.void], offset: int, count: int) -> NDArray[np.void]:
    data = file.read(offset, count * layout.itemsize)
    if len(data) < count * layout.itemsize:
        raise ObjectUnreadableError(f"the {table} are truncated")
    return np.frombuffer(data, layout)


def positions(data: bytes, wanted: bytes) -> Iterator[int]:
    position = data.find(wanted)
    while position >= 0:
        yield position
        position = data.find(wanted, position + 1)


@functools.cache
def _section_layout(word_bytes: int, byte_order: ByteOrder) -> np.dtype[np.void]:
    word, half = f"{byte_order}u{word_bytes}", f"{byte_order}u4"
    addresses = [("flags", word), ("addr", word), ("offset", word), ("size", word)]
    links = [("link", half), ("info", half), ("align", word), ("entsize", word)]
    return np.dtype([("name", half), ("type", half), *addresses, *links])


@functools.cache
def _segment_layout(word_bytes: int, byte_order: ByteOrder) -> np.dtype[np.void]:
    word, half = f"{byte_order}u{word_bytes}", f"{byte_order}u4"
    addresses = [("offset", word), ("vaddr", word), ("paddr", word), ("filesz", word), ("memsz", word)]
    if word_bytes == 8:
        return np.dtype([("type", half), ("flags", half), *addresses, ("align", word)])
    return np.dtype([("type", half), *addresses, ("flags", half), ("align", word)])
