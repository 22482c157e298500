"""Which segments processes have in memory as they are in the file."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import pytest

from stapsdtd.elf.container import open_container
from stapsdtd.elf.read_only import MAX_READ_ONLY_SEGMENTS, read_only_segments
from stapsdtd.model import FileOffset, ReadOnlySegment, Vaddr
from tests.unit.elf_builder import (
    DATA_FILE_SIZE,
    DATA_OFFSET,
    DATA_VADDR,
    TEXT_OFFSET,
    TEXT_VADDR,
    ByteOrder,
    Elf,
    R,
    Segment,
    W,
    X,
    parse_notes,
)

PT_DYNAMIC, PT_GNU_RELRO = 2, 0x6474E552
DT_NULL, DT_TEXTREL, DT_FLAGS, DF_TEXTREL = 0, 22, 30, 4
TEXT = Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100)
DATA = Segment(R | W, DATA_VADDR, DATA_OFFSET, DATA_FILE_SIZE, 0x800)


def read_only(*segments: Segment, elf: Elf | None = None) -> tuple[ReadOnlySegment, ...]:
    file = replace(elf or Elf(), segments=list(segments)).build()
    return read_only_segments(open_container(io.BytesIO(file)))


def read(segment: Segment) -> ReadOnlySegment:
    return ReadOnlySegment(Vaddr(segment.vaddr), FileOffset(segment.offset), segment.file_size)


def dynamic(*entries: tuple[int, int], bits: int = 64, byte_order: ByteOrder = "<") -> Elf:
    """A file with a dynamic section in the text, where the builder lets it lie."""
    elf = Elf(bits=bits, byte_order=byte_order)
    words = b"".join(struct.pack(f"{byte_order}2{elf.word}", *entry) for entry in entries)
    elf.text = elf.text[:0x80] + words.ljust(0x80, b"\0")
    assert len(elf.text) == 0x100
    return elf


DYNAMIC = Segment(R | W, TEXT_VADDR + 0x80, TEXT_OFFSET + 0x80, 0x80, kind=PT_DYNAMIC)


def test_segments_without_write_permission() -> None:
    constants = Segment(R, 0x500000, 0x800, 0x100)
    assert read_only(TEXT, DATA, constants) == (read(TEXT), read(constants))


def test_relro_is_a_part_of_a_writable_segment() -> None:
    relro = Segment(R, DATA_VADDR, DATA_OFFSET, 0x80, kind=PT_GNU_RELRO)
    assert read_only(TEXT, DATA, relro) == (read(TEXT),)


def test_only_the_part_that_is_in_the_file() -> None:
    """Zeros follow in memory, on a page whose rest the file fills there with something else."""
    constants = Segment(R, 0x500000, 0x800, 0x100, 0x2000)
    assert read_only(TEXT, constants) == (read(TEXT), ReadOnlySegment(Vaddr(0x500000), FileOffset(0x800), 0x100))


@pytest.mark.parametrize(
    "wrong",
    [
        Segment(R, 0x500000, 0x800, 0, 0x100),
        Segment(R, 0x500000, 1 << 40, 0x100),
        Segment(R, 0x500000, 0x800, 1 << 40),
        Segment(R, 0x500000, (1 << 64) - 1, 0x100),
        Segment(R, 0x500000, (1 << 64) - 0x80, 0x100),
    ],
)
def test_segment_that_the_file_does_not_have_is_none(wrong: Segment) -> None:
    assert read_only(TEXT, wrong) == (read(TEXT),)


def test_segment_that_ends_with_the_file_is_one() -> None:
    whole = Segment(R, 0x10000000, 0x100, 0x100)
    size = len(replace(Elf(), segments=[TEXT, whole]).build())
    for byte_count in (size - 0x100, size - 0xFF):
        whole = replace(whole, file_size=byte_count)
        expected = (read(TEXT), read(whole))[: 2 if byte_count == size - 0x100 else 1]
        assert read_only(TEXT, whole) == expected


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("entry", [(DT_TEXTREL, 0), (DT_FLAGS, DF_TEXTREL), (DT_FLAGS, DF_TEXTREL | 8)])
def test_text_relocations_write_to_all_of_them(bits: int, byte_order: ByteOrder, entry: tuple[int, int]) -> None:
    elf = dynamic((5, 0x1000), entry, (DT_NULL, 0), bits=bits, byte_order=byte_order)
    assert read_only(TEXT, DATA, DYNAMIC, elf=elf) == ()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("entry", [(DT_FLAGS, 8), (5, DT_TEXTREL), (6, 0)])
def test_other_dynamic_entries_do_not_matter(bits: int, entry: tuple[int, int]) -> None:
    elf = dynamic(entry, (DT_NULL, 0), bits=bits)
    assert read_only(TEXT, DATA, DYNAMIC, elf=elf) == (read(TEXT),)


@pytest.mark.parametrize(
    "hostile",
    [
        Segment(R, 0, 1 << 40, 0x100, kind=PT_DYNAMIC),
        Segment(R, 0, TEXT_OFFSET, 1 << 60, kind=PT_DYNAMIC),
        Segment(R, 0, TEXT_OFFSET + 0x80, 7, kind=PT_DYNAMIC),
        Segment(R, 0, TEXT_OFFSET + 0x80, 0, kind=PT_DYNAMIC),
    ],
)
def test_dynamic_section_that_is_none_costs_nothing(hostile: Segment) -> None:
    assert read_only(TEXT, hostile) == (read(TEXT),)


def test_only_so_many_segments_are_told() -> None:
    more = [Segment(R, 0x10000000 + 0x1000 * number, 0x800, 0x10) for number in range(2 * MAX_READ_ONLY_SEGMENTS)]
    found = read_only(TEXT, *more)
    assert len(found) == MAX_READ_ONLY_SEGMENTS
    assert found[:2] == (read(TEXT), read(more[0]))


def test_object_with_probes_tells_its_own() -> None:
    assert parse_notes(Elf().note()).read_only == (read(TEXT),)


def test_nobody_asks_for_those_of_an_object_without_probes() -> None:
    assert parse_notes(elf=Elf()).read_only == ()
