from __future__ import annotations

import io
import struct

import pytest

from stapsdtd.elf import parse_object
from stapsdtd.errors import ObjectUnreadableError
from tests.unit.elf_builder import (
    X86_64,
    Elf,
    parse,
)


def unreadable(image: bytes) -> str:
    with pytest.raises(ObjectUnreadableError) as error:
        parse(image)
    return error.value.reason


@pytest.mark.parametrize("image", [b"", b"\x7fEL", b"#!/bin/sh\n", bytes(64), b"\x7fELF"[::-1] + bytes(60)])
def test_no_elf_file(image: bytes) -> None:
    assert unreadable(image) == "not an ELF file"


@pytest.mark.parametrize(("at", "value"), [(4, 0), (4, 3), (5, 0), (5, 3)])
def test_of_no_class_or_byte_order(at: int, value: int) -> None:
    image = bytearray(Elf().build())
    image[at] = value
    assert unreadable(bytes(image)) == "unknown ELF class or byte order"


@pytest.mark.parametrize("bits", [32, 64])
def test_truncated_anywhere(bits: int) -> None:
    elf = Elf(bits=bits, machine=X86_64, notes=Elf(bits=bits).note())
    image = elf.build()
    for length in (*range(64), *range(64, len(image), 37), len(image) - 1):
        assert unreadable(image[:length])


def patched(offset: int, layout: str, *values: int) -> bytes:
    image = bytearray(Elf(notes=Elf().note()).build())
    struct.pack_into(layout, image, offset, *values)
    return bytes(image)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (patched(60, "<H", 65535), "the section headers are truncated"),
        (patched(40, "<Q", 2**64 - 1), "the section headers are truncated"),
        (patched(58, "<H", 1), "section headers of 1 bytes"),
        (patched(56, "<H", 65535), "65535 program headers, more than the kernel loads"),
        (patched(54, "<H", 57), "program headers of 57 bytes"),
        (patched(32, "<Q", 2**63), "the program headers are truncated"),
    ],
)
def test_hostile_headers(image: bytes, reason: str) -> None:
    assert unreadable(image) == reason


def test_a_count_of_sections_in_the_first_section() -> None:
    image = bytearray(Elf(notes=Elf().note()).build())
    table, count, names = *struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HH", image, 60)
    struct.pack_into("<HH", image, 60, 0, 0xFFFF)
    struct.pack_into("<Q", image, table + 32, count)
    struct.pack_into("<I", image, table + 40, names)
    assert len(parse(bytes(image)).sites) == 1
    struct.pack_into("<Q", image, table + 32, 2**63)
    assert unreadable(bytes(image)) == f"{2**63} section headers, more than 65535"


@pytest.mark.parametrize("index", [0, 100, 0xFFFF])
def test_without_section_names_there_are_no_notes(index: int) -> None:
    assert parse(patched(62, "<H", index)).sites == ()


def test_names_of_sections_beyond_their_bound() -> None:
    image = bytearray(Elf(notes=Elf().note()).build())
    (table,), (names,) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<H", image, 62)
    struct.pack_into("<Q", image, table + 64 * names + 32, 2**40)
    assert unreadable(bytes(image)) == f"section names of {2**40} bytes"


class _Broken(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        del size
        raise OSError(5, "Input/output error")


def test_a_file_whose_disk_fails() -> None:
    with pytest.raises(ObjectUnreadableError, match="reading failed: Input/output error"):
        parse_object(_Broken(Elf().build()))


def test_a_file_that_shrinks_while_it_is_read() -> None:
    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(size)[: 60 if size and size > 100 else None]

    with pytest.raises(ObjectUnreadableError):
        parse_object(Shrinking(Elf(notes=Elf().note()).build()))
