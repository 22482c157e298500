"""Bounds of memory and time, and mutated files: nothing but ObjectUnreadableError is raised."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.elf import parse_object
from stapsdtd.elf.sites import MAX_NOTES
from stapsdtd.errors import ObjectUnreadableError
from tests.fuzz.examples import examples
from tests.unit.elf_builder import (
    DATA_VADDR,
    I386,
    NOP,
    S390,
    SHT_NOTE,
    SHT_PROGBITS,
    TEXT_OFFSET,
    TEXT_VADDR,
    X86_64,
    ByteOrder,
    Elf,
    Section,
    Symbol,
    parse,
    parse_notes,
    problem,
)


def many_notes(count: int) -> Elf:
    elf = Elf(NOP * count, symbols=[Symbol(b"f%d" % i, TEXT_VADDR + i, 64) for i in range(0, count, 64)])
    arguments = [b"8@%%rdi -4@%d(%%rbp)" % -i for i in range(1000)]
    elf.notes = b"".join(
        elf.note(TEXT_VADDR + i, name=b"probe%d" % (i % 100), arguments=arguments[i % 1000]) for i in range(count)
    )
    return elf


def test_four_hundred_thousand_notes() -> None:
    parsed = parse(many_notes(400_000).build())
    assert len(parsed.sites) == 400_000
    assert parsed.problems == ()
    assert parsed.sites[-1].site_offset == TEXT_OFFSET + 399_999
    assert parsed.sites[-1].function == "f399936"


def test_notes_beyond_their_bound_are_lost_and_reported() -> None:
    foreign = Elf().raw_note(b"", owner=b"") * MAX_NOTES
    assert problem(parse_notes(foreign, Elf().note())).reason == "more than 500000 notes: ignoring the rest"


def test_argument_strings_beyond_their_bound_are_reported() -> None:
    elf = Elf(NOP * 2000)
    arguments = [b"8@%d(%%rbp) " % i + b"z" * 4000 for i in range(2000)]
    parsed = parse_notes(*(elf.note(TEXT_VADDR + i, arguments=a) for i, a in enumerate(arguments)), elf=elf)
    assert 1000 < len(parsed.sites) < 1100
    assert {problem.reason for problem in parsed.problems} == {"the object has too many different argument strings"}


@pytest.mark.timeout(20)
def test_65535_sections_of_the_same_hostile_notes() -> None:
    """Each one by itself is fine; all of them together would be 65 GB."""
    notes = Section(b".notes", SHT_PROGBITS, Elf().raw_note(b"", owner=b"") * 80_000)
    elf = Elf(more_sections=[notes, *(Section(b".note.stapsdt", SHT_NOTE) for _ in range(60_000))])
    image = bytearray(elf.build())
    (table,) = struct.unpack_from("<Q", image, 40)
    (at,) = struct.unpack_from("<Q", image, table + 64 * 4 + 24)
    for i in range(5, 60_005):
        struct.pack_into("<QQ", image, table + 64 * i + 24, at, len(notes.data))
    assert problem(parse(bytes(image))).reason == "more than 500000 notes: ignoring the rest"


def test_a_sparse_file_of_a_terabyte(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    elf = Elf(more_sections=[Section(b".note.stapsdt", SHT_NOTE, Elf().note(), size=2**40)])
    with open(path, "w+b", buffering=0) as file:
        file.write(elf.build())
        file.truncate(2**41)
        parsed = parse_object(file)
    assert len(parsed.sites) == 1
    truncated, section = parsed.problems
    assert truncated.reason == "the note at byte 56 of 67108864 is truncated: ignoring the notes after it"
    assert section.reason == f"a section of {2**40} bytes of notes extends beyond the limit for an object"


def _sample(bits: int, byte_order: ByteOrder, machine: int) -> bytes:
    elf = Elf(bits=bits, byte_order=byte_order, machine=machine)
    elf.notes = elf.note(arguments=b"8@%rdi -4@-8(%rbp)", semaphore=DATA_VADDR) + elf.note(TEXT_VADDR + 1)
    elf.symbols = [Symbol(b"main", TEXT_VADDR, 8), Symbol(b"f", TEXT_VADDR + 8)]
    elf.more_sections = [Section(b".note.gnu.build-id", SHT_NOTE, elf.raw_note(b"1234", b"GNU\0"))]
    return elf.build()


SAMPLES = [_sample(64, "<", X86_64), _sample(32, "<", I386), _sample(64, ">", S390)]

EXTREMES = st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1])


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    image = bytearray(draw(st.sampled_from(SAMPLES)))
    # Headers, then the notes, symbols and section table: between them lie 8 KB that mean nothing.
    places = st.integers(0, 0x100) | st.integers(TEXT_OFFSET + 0x100, len(image) - 9)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(places)
        width = draw(st.sampled_from([1, 2, 4, 8]))
        value = draw(EXTREMES | st.integers(0, 2**64 - 1)) % 2 ** (8 * width)
        image[at : at + width] = value.to_bytes(width, draw(st.sampled_from(["little", "big"])))
    return bytes(image[: draw(st.just(len(image)) | st.integers(0, len(image)))])


@pytest.mark.timeout(600)  # ./dev fuzz tries more
@examples(500)
@given(mutations())
def test_no_mutation_raises_anything_else(image: bytes) -> None:
    try:
        parsed = parse(image)
    except ObjectUnreadableError:
        return
    for site in parsed.sites:
        assert image[site.site_offset : site.site_offset + 1]
        assert site.semaphore_offset is None or 0 < site.semaphore_offset <= len(image) - 2
        assert site.provider
        assert site.name
    for found in parsed.problems:
        assert found.reason
        (found.provider + found.name + found.reason).encode()


@examples(500)
@given(st.binary(max_size=400))
def test_no_random_notes_raise_anything(notes: bytes) -> None:
    parse(Elf(notes=notes).build())
