from __future__ import annotations

import pytest

from tests.unit.elf_builder import (
    NOP,
    PT_NOTE,
    SHT_NOTE,
    TEXT_OFFSET,
    TEXT_VADDR,
    Elf,
    R,
    Section,
    Segment,
    parse,
)


def test_build_id_of_the_section() -> None:
    note = Elf().raw_note(bytes.fromhex("00AAbb"), owner=b"GNU\0")
    elf = Elf(more_sections=[Section(b".note.gnu.build-id", SHT_NOTE, note)])
    assert parse(elf.build()).build_id == "00aabb"


def test_build_id_of_the_segment() -> None:
    """In PT_NOTE of alignment 8 the notes are padded to 8: as ld lays out .note.gnu.property."""
    other = Elf().raw_note(bytes(4), owner=b"GNU\0", kind=5) + bytes(4)
    notes = other + Elf().raw_note(b"\x12\x34", owner=b"GNU\0")
    elf = Elf(notes + NOP)
    elf.segments = [
        *elf.default_segments(),
        Segment(R, TEXT_VADDR, TEXT_OFFSET, len(notes), kind=PT_NOTE, alignment=8),
    ]
    assert parse(elf.build()).build_id == "1234"


@pytest.mark.parametrize("length", [0, 65, 4000])
def test_a_build_id_of_an_implausible_length(length: int) -> None:
    note = Elf().raw_note(bytes(length), owner=b"GNU\0")
    elf = Elf(more_sections=[Section(b".note.gnu.build-id", SHT_NOTE, note)])
    assert parse(elf.build()).build_id is None


def test_a_truncated_build_id() -> None:
    note = Elf().raw_note(bytes(20), owner=b"GNU\0", size=2**32 - 1)
    elf = Elf(more_sections=[Section(b".note.gnu.build-id", SHT_NOTE, note)])
    assert parse(elf.build()).build_id is None
