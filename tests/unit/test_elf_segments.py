from __future__ import annotations

import mmap

import pytest

from stapsdtd.elf.container import PT_GNU_RELRO
from stapsdtd.model import Problem, Site
from tests.unit.elf_builder import (
    DATA_FILE_SIZE,
    DATA_MEMORY_SIZE,
    DATA_OFFSET,
    DATA_VADDR,
    NOP,
    TEXT_OFFSET,
    TEXT_VADDR,
    Elf,
    R,
    Segment,
    W,
    X,
    parse_notes,
    problem,
)


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        (0, "the location 0x0 is in no load segment"),
        (TEXT_VADDR - 1, "the location 0x400fff is in no load segment"),
        (TEXT_VADDR + 0x100, "the location 0x401100 is in no load segment"),
        (2**64 - 1, "the location 0xffffffffffffffff is in no load segment"),
        (DATA_VADDR, "the location 0x3ff000 is not in a code segment"),
    ],
)
def test_a_location_outside_the_code(location: int, reason: str) -> None:
    assert problem(parse_notes(Elf().note(location))) == Problem("app", "probe", reason)


def test_a_location_in_the_zeros_after_the_file() -> None:
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100, 0x200)])
    reason = problem(parse_notes(elf.note(TEXT_VADDR + 0x100), elf=elf)).reason
    assert reason == "the location 0x401100 is in memory not backed by the file, out of the kernel's reach"


def test_the_kernel_arms_no_writable_code() -> None:
    elf = Elf(segments=[Segment(R | W | X, TEXT_VADDR, TEXT_OFFSET, 0x100)])
    assert problem(parse_notes(elf.note(), elf=elf)).reason == "the location 0x401000 is not in a code segment"


def refused(semaphore: int, elf: Elf | None = None) -> Site:
    """The one site of a note with that semaphore, which nobody can arm."""
    (site,) = parse_notes((elf or Elf()).note(semaphore=semaphore), elf=elf).sites
    assert site.refused
    return site


@pytest.mark.parametrize(
    ("semaphore", "reason"),
    [
        (TEXT_VADDR, "the semaphore 0x401000 is not in a writable segment"),
        (1, "the semaphore 0x1 is in no load segment"),
        (DATA_VADDR + DATA_MEMORY_SIZE, "the semaphore 0x3ff800 is in no load segment"),
        (DATA_VADDR + 1, "the semaphore's file offset 0x1001 is not a multiple of 2, or is 0"),
    ],
)
def test_a_semaphore_that_the_kernel_cannot_raise(semaphore: int, reason: str) -> None:
    site = refused(semaphore)
    assert (site.refused, site.semaphore_offset) == (reason, None)


@pytest.mark.parametrize("place", [DATA_FILE_SIZE, mmap.PAGESIZE - 2])
def test_a_semaphore_that_the_loader_clears(place: int) -> None:
    data = Segment(R | W, DATA_VADDR - mmap.PAGESIZE, DATA_OFFSET, DATA_FILE_SIZE, 2 * mmap.PAGESIZE)
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100), data])
    assert "is in .bss, which the loader clears" in str(refused(data.vaddr + place, elf).refused)
    reason = f"the semaphore {DATA_VADDR:#x} is in memory not backed by the file, out of the kernel's reach"
    assert refused(DATA_VADDR, elf).refused == reason


def test_a_semaphore_that_the_loader_makes_read_only() -> None:
    size = 2 * mmap.PAGESIZE
    code = Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100)
    data = Segment(R | W, DATA_VADDR - mmap.PAGESIZE, 0x40, size)
    relro = Segment(R, data.vaddr + 0x20, data.offset + 0x20, mmap.PAGESIZE, kind=PT_GNU_RELRO)
    elf = Elf(NOP * size, segments=[code, data, relro])
    site = refused(data.vaddr, elf)
    assert "in data that the loader makes read-only (RELRO)" in str(site.refused)
    assert site.semaphore_offset == data.offset
    # the end of RELRO is in a page that stays writable
    (site,) = parse_notes(elf.note(semaphore=DATA_VADDR), elf=elf).sites
    assert site.refused is None


def test_a_semaphore_in_a_segment_without_a_file() -> None:
    data = Segment(R | W, DATA_VADDR, DATA_OFFSET, 0, mmap.PAGESIZE)
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100), data])
    assert "in memory not backed by the file" in str(refused(DATA_VADDR, elf).refused)


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (2**40, "the semaphore's file offset 0x10000000000 is beyond the file's end"),
        (0, "the semaphore's file offset 0x0 is not a multiple of 2, or is 0"),
    ],
)
def test_a_semaphore_that_the_file_does_not_have(offset: int, reason: str) -> None:
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100), Segment(R | W, DATA_VADDR, offset, 0x100)])
    assert refused(DATA_VADDR, elf).refused == reason


@pytest.mark.parametrize(
    "other",
    [
        Segment(R | X, TEXT_VADDR, 0, 0x100),
        Segment(R, TEXT_VADDR - 0x100, 0, 0x101),
        Segment(R | X, 0, 0, 2**64 - 1),
        Segment(R, 0, 0, 0, 2**64 - 1),
    ],
)
def test_overlapping_segments(other: Segment) -> None:
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100), other])
    reason = problem(parse_notes(elf.note(), elf=elf)).reason
    assert reason == "the location 0x401000 is in overlapping load segments"


def test_an_overlap_elsewhere_costs_nothing() -> None:
    elf = Elf(
        segments=[
            Segment(R, 0x1000, 0, 0x100),
            Segment(R, 0x1080, 0, 0x100),
            Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100),
        ]
    )
    assert len(parse_notes(elf.note(), elf=elf).sites) == 1


def test_segments_in_any_order() -> None:
    elf = Elf()
    elf.segments = list(reversed(elf.default_segments()))
    (site,) = parse_notes(elf.note(semaphore=DATA_VADDR), elf=elf).sites
    assert (site.site_offset, site.semaphore_offset) == (TEXT_OFFSET, DATA_OFFSET)


def test_an_object_without_segments() -> None:
    assert problem(parse_notes(Elf().note(), elf=Elf(segments=[]))).reason == (
        "the location 0x401000 is in no load segment"
    )
