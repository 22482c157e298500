from __future__ import annotations

import struct

import pytest

from stapsdtd.elf.notes import MAX_ARGUMENTS
from stapsdtd.model import MAX_ARGUMENTS_BYTES, MAX_NAME_BYTES, ParsedObject, Problem
from tests.unit.elf_builder import (
    BASE_VADDR,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_PROGBITS,
    TEXT_VADDR,
    Elf,
    Section,
    parse,
    parse_notes,
    problem,
)


def addresses() -> bytes:
    return struct.pack("<QQQ", TEXT_VADDR, BASE_VADDR, 0)


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        (b"", Problem("", "", "the provider is not NUL-terminated")),
        (b"app", Problem("", "", "the provider is not NUL-terminated")),
        (b"app\0probe", Problem("app", "", "the name is not NUL-terminated")),
        (b"app\0probe\x008@%rdi", Problem("app", "probe", "the argument string is not NUL-terminated")),
        (b"\0probe\0\0", Problem("", "probe", "the provider is empty")),
        (b"app\0\0\0", Problem("app", "", "the name is empty")),
        (b"\0\0\0", Problem("", "", "the provider is empty")),
        (
            b"a" * 513 + b"\0probe\0\0",
            Problem("a" * MAX_NAME_BYTES, "probe", "provider or name is longer than 512 bytes"),
        ),
        (
            b"app\0" + b"b" * 513 + b"\0\0",
            Problem("app", "b" * MAX_NAME_BYTES, "provider or name is longer than 512 bytes"),
        ),
        (
            b"app\0probe\0" + b"x" * (MAX_ARGUMENTS_BYTES + 1) + b"\0",
            Problem("app", "probe", "4097 bytes of arguments, more than 4096"),
        ),
        (
            b"app\0probe\0" + b"4@$1 " * (MAX_ARGUMENTS + 1) + b"\0",
            Problem("app", "probe", "129 arguments, more than 128"),
        ),
    ],
)
def test_strings_that_cannot_be_used(strings: bytes, expected: Problem) -> None:
    elf = Elf()
    parsed = parse_notes(elf.raw_note(addresses() + strings), elf.note())
    assert len(parsed.sites) == 1
    assert parsed.problems == (expected,)


def test_strings_at_their_bounds() -> None:
    note = Elf().note(TEXT_VADDR, b"a" * MAX_NAME_BYTES, b"b" * MAX_NAME_BYTES, b"4@$1 " * MAX_ARGUMENTS)
    (site,) = parse_notes(note).sites
    assert len(site.arguments) == MAX_ARGUMENTS


@pytest.mark.parametrize("length", [0, 23])
def test_a_descriptor_too_short_for_its_addresses(length: int) -> None:
    reason = f"a descriptor of {length} bytes is too short for its three addresses"
    assert problem(parse_notes(Elf().raw_note(bytes(length)))) == Problem("", "", reason)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),  # a surrogate
        ("größe".encode(), "größe"),
        (b"a b\nc:d%s", "a b\nc:d%s"),
    ],
)
def test_hostile_bytes_can_be_shown(raw: bytes, shown: str) -> None:
    (site,) = parse_notes(Elf().note(TEXT_VADDR, raw, raw, raw)).sites
    assert (site.provider, site.name) == (shown, shown)
    "".join((site.provider, site.name, *(argument.text for argument in site.arguments))).encode("utf-8")


def test_padding_that_is_counted_in() -> None:
    (site,) = parse_notes(Elf().raw_note(addresses() + b"app\0probe\x004@$1\0\0\0\0\0\0")).sites
    assert [argument.text for argument in site.arguments] == ["4@$1"]


def test_foreign_notes_are_skipped() -> None:
    elf = Elf()
    parsed = parse_notes(
        elf.raw_note(b"12345", owner=b"GNU\0"),
        elf.raw_note(b"", owner=b""),
        elf.raw_note(elf.note()[20:], kind=4),
        elf.raw_note(elf.note()[20:], owner=b"stapsdt"),
        elf.note(name=b"ours"),
    )
    assert [site.name for site in parsed.sites] == ["ours"]
    assert parsed.problems == ()


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0xFFFFFFFC, 10_000])
def test_a_descriptor_size_beyond_the_section(size: int) -> None:
    elf = Elf()
    parsed = parse_notes(elf.note(), elf.raw_note(b"x" * 40, size=size), elf.note(name=b"after"))
    assert [site.name for site in parsed.sites] == ["probe"]
    (found,) = parsed.problems
    assert "is truncated: ignoring the notes after it" in found.reason


def test_an_owner_size_beyond_the_section() -> None:
    elf = Elf()
    parsed = parse_notes(elf.note(), struct.pack("<III", 0xFFFFFFFD, 0, 3))
    assert len(parsed.sites) == len(parsed.problems) == 1


def test_notes_truncated_anywhere() -> None:
    elf = Elf()
    notes = elf.note(TEXT_VADDR, arguments=b"8@%rdi") + elf.note(TEXT_VADDR + 1, arguments=b"8@%rsi")
    end_of_first = len(notes) // 2
    for length in range(len(notes)):
        parsed = parse_notes(notes[:length])
        whole = length // end_of_first
        # The strings' last NUL is followed by padding, which may be missing.
        assert len(parsed.sites) in (whole, whole + 1)
        if length % end_of_first:
            assert parsed.problems or len(parsed.sites) == whole + 1


def test_zeros_after_the_last_note() -> None:
    parsed = parse_notes(Elf().note(), bytes(11))
    assert len(parsed.sites) == 1
    assert parsed.problems == ()


def test_several_sections_of_notes() -> None:
    elf = Elf(more_sections=[Section(b".note.stapsdt", SHT_NOTE, Elf().note(name=b"second"))])
    assert [site.name for site in parse_notes(elf.note(name=b"first"), elf=elf).sites] == ["first", "second"]


def test_a_bad_section_costs_only_itself() -> None:
    elf = Elf(more_sections=[Section(b".note.stapsdt", SHT_NOTE, Elf().note(name=b"second"))])
    parsed = parse_notes(b"\xff" * 12, elf=elf)
    assert [site.name for site in parsed.sites] == ["second"]
    assert len(parsed.problems) == 1


@pytest.mark.parametrize("kind", [SHT_NOBITS, SHT_PROGBITS])
def test_a_section_that_holds_no_notes(kind: int) -> None:
    parsed = parse(Elf(more_sections=[Section(b".note.stapsdt", kind, Elf().note())]).build())
    assert problem(parsed).reason == f"a .note.stapsdt section has type {kind}, not SHT_NOTE"


@pytest.mark.parametrize("size", [2**32, 2**64 - 1])
def test_a_section_beyond_the_files_end(size: int) -> None:
    parsed = parse(Elf(more_sections=[Section(b".note.stapsdt", SHT_NOTE, Elf().note(), size=size)]).build())
    assert len(parsed.sites) == 1
    assert parsed.problems[-1].reason == f"a section of {size} bytes of notes extends beyond the file's end"


def test_a_section_at_an_impossible_offset() -> None:
    section = Section(b".note.stapsdt", SHT_NOTE, size=100)
    image = bytearray(Elf(more_sections=[section]).build())
    table = struct.unpack_from("<Q", image, 40)[0]
    rows = struct.unpack_from("<H", image, 60)[0]
    struct.pack_into("<Q", image, table + 64 * (rows - 2) + 24, 2**64 - 50)
    assert problem(parse(bytes(image))).reason == "a section of 100 bytes of notes extends beyond the file's end"


def test_names_that_only_end_alike_are_other_sections() -> None:
    elf = Elf(more_sections=[Section(b"x.note.stapsdt", SHT_NOTE, Elf().note()), Section(b".note.stapsdtx", SHT_NOTE)])
    assert parse(elf.build()) == ParsedObject("x86-64", None, (), ())
