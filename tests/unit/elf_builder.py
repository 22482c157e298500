"""Builds ELF files in code, right ones and wrong ones.

headers │ text at 0x1000, vaddr 0x401000, r-x │ data at 0x2000, vaddr 0x403000, rw- │ other sections │ section table
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass, field, replace
from typing import Literal

from stapsdtd.elf import parse_object
from stapsdtd.model import ParsedObject, Problem

ByteOrder = Literal["<", ">"]

X86_64, I386, ARM, AARCH64, S390, PPC64, RISCV, LOONGARCH = 62, 3, 40, 183, 22, 21, 243, 258
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = 1, 2, 3, 7, 8, 11
PT_LOAD, PT_NOTE = 1, 4
R, W, X = 4, 2, 1

TEXT_VADDR, TEXT_OFFSET = 0x401000, 0x2000
DATA_VADDR, DATA_OFFSET = 0x3FF000, 0x1000
DATA_FILE_SIZE, DATA_MEMORY_SIZE = 0x100, 0x800
BASE_VADDR = 0x3FE000

NOP = b"\x90"


@dataclass
class Segment:
    flags: int
    vaddr: int
    offset: int
    file_size: int
    memory_size: int | None = None
    kind: int = PT_LOAD
    alignment: int = 0x1000


@dataclass
class Section:
    name: bytes
    kind: int
    data: bytes = b""
    vaddr: int = 0
    link: int = 0
    entry_size: int = 0
    size: int | None = None
    offset: int | None = None


@dataclass
class Symbol:
    name: bytes
    vaddr: int
    size: int = 0
    kind: int = 2
    binding: int = 1
    section: int = 1


@dataclass
class Elf:
    """The file to be; segments and sections may be replaced and lie at will."""

    text: bytes = NOP * 0x100
    notes: bytes | None = None
    bits: int = 64
    byte_order: ByteOrder = "<"
    machine: int = X86_64
    base_vaddr: int | None = BASE_VADDR
    segments: list[Segment] | None = None
    more_sections: list[Section] = field(default_factory=list)
    symbols: list[Symbol] | None = None
    symbols_kind: int = SHT_SYMTAB

    @property
    def word(self) -> str:
        return "Q" if self.bits == 64 else "I"

    def note(
        self,
        location: int = TEXT_VADDR,
        provider: bytes = b"app",
        name: bytes = b"probe",
        arguments: bytes = b"",
        *,
        base: int = BASE_VADDR,
        semaphore: int = 0,
    ) -> bytes:
        addresses = struct.pack(f"{self.byte_order}3{self.word}", location, base, semaphore)
        return self.raw_note(addresses + b"\0".join((provider, name, arguments, b"")))

    def raw_note(self, descriptor: bytes, owner: bytes = b"stapsdt\0", kind: int = 3, size: int | None = None) -> bytes:
        header = struct.pack(f"{self.byte_order}III", len(owner), len(descriptor) if size is None else size, kind)
        return header + padded(owner) + padded(descriptor)

    def build(self) -> bytes:
        text = Section(b".text", SHT_PROGBITS, self.text, TEXT_VADDR, offset=TEXT_OFFSET)
        data = Section(b".data", SHT_PROGBITS, bytes(DATA_FILE_SIZE), DATA_VADDR, offset=DATA_OFFSET)
        sections = [Section(b"", 0), text, data]
        if self.base_vaddr is not None:
            sections.append(Section(b".stapsdt.base", SHT_PROGBITS, b"\0", self.base_vaddr))
        if self.notes is not None:
            sections.append(Section(b".note.stapsdt", SHT_NOTE, self.notes))
        if self.symbols is not None:
            sections += self.symbol_sections(len(sections))
        sections += self.more_sections
        return self._assemble(sections, self.default_segments() if self.segments is None else self.segments)

    def default_segments(self) -> list[Segment]:
        return [
            Segment(R | X, TEXT_VADDR, TEXT_OFFSET, len(self.text)),
            Segment(R | W, DATA_VADDR, DATA_OFFSET, DATA_FILE_SIZE, DATA_MEMORY_SIZE),
        ]

    def symbol_sections(self, index: int) -> list[Section]:
        strings, table = bytearray(1), bytearray()
        for symbol in [Symbol(b"", 0, 0, 0, 0, 0), *(self.symbols or [])]:
            at = len(strings) if symbol.name else 0
            strings += symbol.name + b"\0" if symbol.name else b""
            info = symbol.binding << 4 | symbol.kind
            if self.bits == 64:
                table += struct.pack(f"{self.byte_order}IBBHQQ", at, info, 0, symbol.section, symbol.vaddr, symbol.size)
            else:
                table += struct.pack(f"{self.byte_order}IIIBBH", at, symbol.vaddr, symbol.size, info, 0, symbol.section)
        return [
            Section(b".sym", self.symbols_kind, bytes(table), link=index + 1, entry_size=24 if self.bits == 64 else 16),
            Section(b".str", SHT_STRTAB, bytes(strings)),
        ]

    def _assemble(self, sections: list[Section], segments: list[Segment]) -> bytes:
        names = Section(b".shstrtab", SHT_STRTAB)
        sections = [*sections, names]
        names.data = b"\0" + b"".join(section.name + b"\0" for section in sections[1:])
        image = bytearray(TEXT_OFFSET)
        rows, name_at = [], 0
        for section in sections:
            offset = section.offset
            if offset is None:
                offset = len(image)
                image += padded(section.data)
            else:
                image[offset : offset + len(section.data)] = section.data
                image += bytes(-len(image) % 4)
            rows.append(self._section_row(section, offset, name_at))
            name_at += len(section.name) + 1
        header_size, segment_size, section_size = (64, 56, 64) if self.bits == 64 else (52, 32, 40)
        section_table_at = len(image)
        image += b"".join(rows)
        table = b"".join(self._segment_row(segment) for segment in segments)
        ident = b"\x7fELF" + bytes([self.bits // 32, 1 if self.byte_order == "<" else 2, 1]) + bytes(9)
        header = ident + struct.pack(
            f"{self.byte_order}HHI3{self.word}IHHHHHH",
            *(3, self.machine, 1, 0, header_size, section_table_at, 0, header_size),
            *(segment_size, len(segments), section_size, len(sections), len(sections) - 1),
        )
        image[: len(header) + len(table)] = header + table
        return bytes(image)

    def _section_row(self, section: Section, offset: int, name_at: int) -> bytes:
        size = len(section.data) if section.size is None else section.size
        return struct.pack(
            f"{self.byte_order}II4{self.word}II2{self.word}",
            *(name_at, section.kind, 0, section.vaddr, offset, size, section.link, 0, 4, section.entry_size),
        )

    def _segment_row(self, segment: Segment) -> bytes:
        memory_size = segment.file_size if segment.memory_size is None else segment.memory_size
        addresses = (segment.offset, segment.vaddr, segment.vaddr, segment.file_size, memory_size)
        if self.bits == 64:
            row = (segment.kind, segment.flags, *addresses, segment.alignment)
            return struct.pack(f"{self.byte_order}II6Q", *row)
        return struct.pack(f"{self.byte_order}8I", segment.kind, *addresses, segment.flags, segment.alignment)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def parse(image: bytes) -> ParsedObject:
    return parse_object(io.BytesIO(image))


def parse_notes(*notes: bytes, elf: Elf | None = None) -> ParsedObject:
    return parse(replace(elf or Elf(), notes=b"".join(notes)).build())


def problem(parsed: ParsedObject) -> Problem:
    assert parsed.sites == ()
    (only,) = parsed.problems
    return only
