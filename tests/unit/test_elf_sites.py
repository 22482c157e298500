"""A note becomes a site: its addresses, its nop, and one of each."""

from __future__ import annotations

import struct

import pytest

from stapsdtd.model import (
    MAX_PROBLEMS,
    NO_PLACE,
    Argument,
    FileOffset,
    ParsedObject,
    Problem,
    ReadOnlySegment,
    Register,
    Site,
    Unavailable,
    Vaddr,
)
from tests.unit.elf_builder import (
    AARCH64,
    ARM,
    BASE_VADDR,
    DATA_OFFSET,
    DATA_VADDR,
    I386,
    LOONGARCH,
    NOP,
    PPC64,
    RISCV,
    S390,
    TEXT_OFFSET,
    TEXT_VADDR,
    X86_64,
    ByteOrder,
    Elf,
    R,
    Segment,
    X,
    parse,
    parse_notes,
    problem,
)


def test_a_note_becomes_a_site() -> None:
    note = Elf().note(TEXT_VADDR + 7, b"postgresql", b"query__start", b"8@%rdi", semaphore=DATA_VADDR + 4)
    assert parse_notes(note) == ParsedObject(
        "x86-64",
        None,
        (
            Site(
                "postgresql",
                "query__start",
                FileOffset(TEXT_OFFSET + 7),
                FileOffset(DATA_OFFSET + 4),
                None,
                (Argument("8@%rdi", 8, signed=False, is_float=False, operand=Register("rdi")),),
                1,
            ),
        ),
        (),
        read_only=(ReadOnlySegment(Vaddr(TEXT_VADDR), FileOffset(TEXT_OFFSET), 0x100),),
    )


def test_an_object_without_notes() -> None:
    assert parse(Elf().build()) == ParsedObject("x86-64", None, (), ())


def test_an_object_without_sections() -> None:
    image = bytearray(Elf(notes=Elf().note()).build())
    struct.pack_into("<Q", image, 40, 0)
    struct.pack_into("<HHH", image, 58, 0, 0, 0)
    assert parse(bytes(image)) == ParsedObject("x86-64", None, (), ())


@pytest.mark.parametrize(
    ("machine", "bits", "byte_order", "nop", "architecture"),
    [
        (X86_64, 64, "<", "90", "x86-64"),
        (X86_64, 32, "<", "90", "x32"),
        (I386, 32, "<", "90", "i386"),
        (AARCH64, 64, "<", "1f2003d5", "aarch64"),
        (ARM, 32, "<", "00f020e3", "arm"),
        (S390, 64, ">", "0707", "s390x"),
        (PPC64, 64, "<", "00000060", "ppc64le"),
        (PPC64, 64, ">", "60000000", "ppc64"),
        (RISCV, 64, "<", "0100", "riscv64"),
        (LOONGARCH, 64, "<", "00004003", "loongarch64"),
    ],
)
def test_both_classes_and_byte_orders(
    machine: int, bits: int, byte_order: ByteOrder, nop: str, architecture: str
) -> None:
    elf = Elf(bytes(16) + bytes.fromhex(nop), bits=bits, byte_order=byte_order, machine=machine)
    parsed = parse_notes(elf.note(TEXT_VADDR + 16, arguments=b"-4@whatever", semaphore=DATA_VADDR), elf=elf)
    assert parsed.architecture == architecture
    assert parsed.problems == ()
    (site,) = parsed.sites
    assert (site.site_offset, site.semaphore_offset) == (TEXT_OFFSET + 16, DATA_OFFSET)
    (argument,) = site.arguments
    assert (argument.size, argument.signed) == (4, True)
    if architecture == "x32":
        assert argument.operand == Unavailable("operands of x32 are not supported yet")


@pytest.mark.parametrize(
    ("machine", "bits", "byte_order", "name"),
    [(8, 32, ">", "machine-8"), (0xBEEF, 64, "<", "machine-48879"), (ARM, 32, ">", "machine-40")],
)
def test_no_probe_is_armed_where_nops_are_unknown(machine: int, bits: int, byte_order: ByteOrder, name: str) -> None:
    elf = Elf(bits=bits, byte_order=byte_order, machine=machine)
    parsed = parse_notes(elf.note(), elf=elf)
    assert parsed.architecture == name
    assert problem(parsed).reason == f"the nop of {name} is unknown, so a probe could corrupt the program"


def test_one_probe_with_several_sites_and_semaphores() -> None:
    elf = Elf()
    parsed = parse_notes(
        elf.note(TEXT_VADDR),
        elf.note(TEXT_VADDR + 1, semaphore=DATA_VADDR),
        elf.note(TEXT_VADDR + 2, semaphore=DATA_VADDR + 2),
    )
    assert [site.semaphore_offset for site in parsed.sites] == [None, DATA_OFFSET, DATA_OFFSET + 2]


def test_a_library_of_libstapsdt() -> None:
    """Stubs `90 90 90 90 c3`, sizes unpadded, and the notes outside every segment."""
    elf = Elf(b"\x90\x90\x90\x90\xc3" * 2)
    parsed = parse_notes(
        elf.note(TEXT_VADDR, b"node", b"first", b"8@%rdi -4@%rsi"), elf.note(TEXT_VADDR + 5, b"node", b"b"), elf=elf
    )
    assert [(site.name, site.site_offset) for site in parsed.sites] == [("first", TEXT_OFFSET), ("b", TEXT_OFFSET + 5)]


def test_prelink_moves_location_and_semaphore() -> None:
    """The object was moved by 0x1000 after its notes were written."""
    note = Elf().note(TEXT_VADDR + 3 - 0x1000, base=BASE_VADDR - 0x1000, semaphore=DATA_VADDR + 2 - 0x1000)
    (site,) = parse_notes(note).sites
    assert (site.site_offset, site.semaphore_offset) == (TEXT_OFFSET + 3, DATA_OFFSET + 2)


def test_prelink_moves_downwards_and_leaves_no_semaphore_alone() -> None:
    (site,) = parse_notes(Elf().note(TEXT_VADDR + 0x5000, base=BASE_VADDR + 0x5000)).sites
    assert (site.site_offset, site.semaphore_offset) == (TEXT_OFFSET, None)


def test_prelink_wraps_at_the_targets_word() -> None:
    elf = Elf(bits=32, machine=I386)
    location, base = (TEXT_VADDR - 0x500000) % 2**32, (BASE_VADDR - 0x500000) % 2**32
    (site,) = parse_notes(elf.note(location, base=base), elf=elf).sites
    assert site.site_offset == TEXT_OFFSET


@pytest.mark.parametrize(("base", "base_vaddr"), [(0, BASE_VADDR), (BASE_VADDR + 0x1000, None)])
def test_no_adjustment_without_both_bases(base: int, base_vaddr: int | None) -> None:
    elf = Elf(base_vaddr=base_vaddr)
    (site,) = parse_notes(elf.note(TEXT_VADDR, base=base), elf=elf).sites
    assert site.site_offset == TEXT_OFFSET


def test_no_nop_at_the_location() -> None:
    elf = Elf(NOP + b"\xc3\x48\x89\xe5")
    parsed = parse_notes(elf.note(TEXT_VADDR, name=b"good"), elf.note(TEXT_VADDR + 1, name=b"bad"), elf=elf)
    assert [site.name for site in parsed.sites] == ["good"]
    assert parsed.problems == (Problem("app", "bad", "no nop at the location: bytes c3 48 89 e5"),)


def test_a_nop_cut_by_its_segments_end() -> None:
    elf = Elf(bytes.fromhex("0f1f4000"), segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 2)])
    assert problem(parse_notes(elf.note(), elf=elf)).reason == "no nop at the location: bytes 0f 1f"


def test_a_location_beyond_the_end_of_the_file() -> None:
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, 2**50, 0x100)])
    assert problem(parse_notes(elf.note(), elf=elf)).reason == "no nop at the location: bytes missing"


def test_a_note_that_stands_twice() -> None:
    note = Elf().note(arguments=b"8@%rdi")
    parsed = parse_notes(note, note)
    assert len(parsed.sites) == 1
    assert parsed.problems == ()


def test_two_notes_of_one_location_that_differ() -> None:
    elf = Elf()
    parsed = parse_notes(elf.note(arguments=b"8@%rdi"), elf.note(arguments=b"8@%rsi"), elf.note(name=b"other"))
    assert [site.name for site in parsed.sites] == ["probe", "other"]
    reason = "another note has the same location with other arguments or another semaphore"
    assert parsed.problems == (Problem("app", "probe", reason, duplicates=parsed.sites[0].site_offset),)
    # its hits are those of the first one
    assert (len(parsed.unusable), parsed.refused) == (1, ())


@pytest.mark.parametrize(
    ("first", "second", "has"),
    [
        (DATA_VADDR, DATA_VADDR + 2, "another semaphore"),
        (DATA_VADDR, 0, "another semaphore"),
        (0, DATA_VADDR, "no semaphore"),
    ],
)
def test_of_two_semaphores_at_one_nop_the_second_is_refused(first: int, second: int, has: str) -> None:
    elf = Elf()
    notes = [(b"one", first), (b"two", second), (b"three", first)]
    sites = parse_notes(*(elf.note(name=name, semaphore=semaphore) for name, semaphore in notes)).sites
    assert [site.refused for site in sites] == [
        None,
        f"app:one, whose note is at the same nop, has {has}, and the kernel takes only one for an instruction",
        None,
    ]


def test_a_note_that_is_refused_anyhow_is_in_nobodys_way() -> None:
    elf = Elf()
    notes = elf.note(name=b"one", semaphore=1), elf.note(name=b"two", semaphore=DATA_VADDR)
    assert [bool(site.refused) for site in parse_notes(*notes).sites] == [True, False]


def test_a_note_in_thumb_code() -> None:
    elf = Elf(bytes.fromhex("00bf0020"), bits=32, machine=ARM)
    (site,) = parse_notes(elf.note(arguments=b"4@r0"), elf=elf).sites
    assert (site.nop_bytes, len(site.arguments)) == (2, 1)
    assert "Thumb code, in which the kernel has no uprobes" in str(site.refused)


def test_of_many_unusable_notes_some_are_kept_and_the_others_counted() -> None:
    elf = Elf(NOP + b"\xc3")
    notes = [elf.note(TEXT_VADDR + 1, name=b"n%d" % number) for number in range(MAX_PROBLEMS + 5)]
    parsed = parse_notes(*notes, elf.note(TEXT_VADDR, name=b"good"), elf=elf)
    assert [site.name for site in parsed.sites] == ["good"]
    assert [each.name for each in parsed.problems] == [f"n{number}" for number in range(MAX_PROBLEMS)]
    assert parsed.problems_left_out == 5


def test_unusable_notes_are_sites_without_a_place() -> None:
    elf = Elf(NOP + b"\xc3")
    bad = elf.note(TEXT_VADDR + 1, name=b"bad", provider=b"other"), elf.note(1 << 40, name=b"bad", provider=b"other")
    parsed = parse_notes(*bad, elf.note(TEXT_VADDR), elf.note(name=b""), elf=elf)
    assert len(parsed.problems) == 3
    (unusable,) = parsed.unusable
    assert (unusable.provider, unusable.name, unusable.site_offset) == ("other", "bad", NO_PLACE)
    assert unusable.refused == "no nop at the location: bytes c3"
    assert sorted(parsed.all_providers - parsed.providers) == ["other"]
