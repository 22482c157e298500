from __future__ import annotations

import pytest

from stapsdtd.model import Problem
from tests.unit.elf_builder import (
    DATA_FILE_SIZE,
    DATA_MEMORY_SIZE,
    DATA_OFFSET,
    DATA_VADDR,
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


@pytest.mark.parametrize(
    ("semaphore", "reason"),
    [
        (TEXT_VADDR, "the semaphore 0x401000 is not in a writable segment"),
        (1, "the semaphore 0x1 is in no load segment"),
        (DATA_VADDR + DATA_MEMORY_SIZE, "the semaphore 0x3ff800 is in no load segment"),
        (
            DATA_VADDR + DATA_FILE_SIZE,
            "the semaphore 0x3ff100 is in memory not backed by the file, out of the kernel's reach",
        ),
        (
            DATA_VADDR + DATA_FILE_SIZE - 1,
            "the semaphore 0x3ff0ff is in memory not backed by the file, out of the kernel's reach",
        ),
        (DATA_VADDR + 1, "the semaphore's file offset 0x1001 is not a multiple of 2, or is 0"),
    ],
)
def test_a_semaphore_that_the_kernel_cannot_raise(semaphore: int, reason: str) -> None:
    assert problem(parse_notes(Elf().note(semaphore=semaphore))).reason == reason


def test_a_semaphore_beyond_the_end_of_the_file() -> None:
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100), Segment(R | W, DATA_VADDR, 2**40, 0x100)])
    reason = problem(parse_notes(elf.note(semaphore=DATA_VADDR), elf=elf)).reason
    assert reason == "the semaphore's file offset 0x10000000000 is beyond the file's end"


def test_a_semaphore_at_file_offset_0() -> None:
    elf = Elf(segments=[Segment(R | X, TEXT_VADDR, TEXT_OFFSET, 0x100), Segment(R | W, DATA_VADDR, 0, 0x100)])
    reason = problem(parse_notes(elf.note(semaphore=DATA_VADDR), elf=elf)).reason
    assert reason == "the semaphore's file offset 0x0 is not a multiple of 2, or is 0"


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
