"""Text that a process does not execute from its file, told from what only looks like that."""

from __future__ import annotations

import pytest

from stapsdtd.kernel.procfs import Region
from stapsdtd.model import FileOffset, Mapping, ReadOnlySegment, Vaddr
from stapsdtd.procs.moved_text import moved, out_of
from stapsdtd.runtime.fair_thread import finish
from tests.unit.samples import site

DEV, INODE, BASE = 0xFE00, 7, 0x5581B0C00000
MAPPING = Mapping(BASE + 0x2000, BASE + 0x6000, FileOffset(0x1000), DEV, INODE, "/bin/app")

# as lld makes them: addresses and offsets do not go together in step, and two segments share a page of the file
SEGMENTS = (
    ReadOnlySegment(Vaddr(0x0), FileOffset(0x0), 0xB00),
    ReadOnlySegment(Vaddr(0x1B00), FileOffset(0xB00), 0x4C00),
    ReadOnlySegment(Vaddr(0x7700), FileOffset(0x5700), 0x900),
)
FIRST, SECOND = site("first", 0x1400), site("second", 0x4400)


def of_file(start: int, end: int, offset: int, permissions: str = "r-xp") -> Region:
    return Region(BASE + start, BASE + end, permissions, offset, DEV, INODE, "/bin/app")


def anonymous(start: int, end: int, permissions: str = "r-xp") -> Region:
    return Region(BASE + start, BASE + end, permissions, 0, 0, 0, "")


HEAD, TAIL = of_file(0x0, 0x1000, 0x0, "r--p"), of_file(0x7000, 0x8000, 0x5000, "r--p")
TEXT = of_file(0x1000, 0x7000, 0x0)


def moved_to(*regions: Region) -> dict[str, list[str]]:
    found = finish(moved([FIRST, SECOND], SEGMENTS, MAPPING, sorted(regions)))
    return {each.memory: [some.name for some in each.sites] for each in found}


def test_sites_that_no_executable_mapping_has() -> None:
    text = Mapping(BASE, BASE + 0x1000, FileOffset(0x1000), DEV, INODE, "/bin/app")
    of_other = Mapping(BASE, BASE + 0x8000, FileOffset(0x0), DEV, 8, "/bin/other")
    assert out_of([FIRST, SECOND], MAPPING, [text, of_other]) == [SECOND]
    assert out_of([FIRST, SECOND], MAPPING, []) == [FIRST, SECOND]


def test_anonymous_memory_between_parts_of_the_text() -> None:
    before, after = of_file(0x1000, 0x5000, 0x0), of_file(0x6000, 0x7000, 0x5000)
    assert moved_to(HEAD, before, anonymous(0x5000, 0x6000), after, TAIL) == {"anonymous memory": ["second"]}


def test_text_that_was_moved_as_a_whole() -> None:
    assert moved_to(HEAD, anonymous(0x1000, 0x7000), TAIL) == {"anonymous memory": ["first", "second"]}


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/anon_hugepage", "anonymous huge pages"),
        ("/var/lib/hugetlbfs/libhugetlbfs.tmp.x1", "/var/lib/hugetlbfs/libhugetlbfs.tmp.x1"),
    ],
)
def test_what_stands_in_its_place_is_named(path: str, shown: str) -> None:
    copy = Region(BASE + 0x1000, BASE + 0x7000, "r-xp", 0, 15, 99, path)
    assert moved_to(HEAD, copy, TAIL) == {shown: ["first", "second"]}


@pytest.mark.parametrize(
    "regions",
    [
        pytest.param([HEAD, TEXT, TAIL, anonymous(0x8000, 0x9000)], id="memory of a JIT behind it"),
        pytest.param([HEAD, anonymous(-0x1000, 0x0), TAIL], id="memory of a JIT in front of text that was unmapped"),
        pytest.param([HEAD, anonymous(0x1000, 0x7000, "rw-p"), TAIL], id="data in the place of its text"),
        pytest.param([anonymous(0x1000, 0x7000)], id="no mapping of the file is left"),
        pytest.param([], id="no process"),
    ],
)
def test_no_false_alarm(regions: list[Region]) -> None:
    assert moved_to(*regions) == {}


def test_a_process_that_maps_a_file_very_often_is_looked_at_in_steps() -> None:
    sites = [site(f"n{number}", 0x1000 + number) for number in range(20_000)]
    apart = [
        Mapping(BASE + page, BASE + page + 1, FileOffset(page), DEV, INODE, "/bin/app")
        for page in range(0, 1 << 28, 1 << 13)
    ]
    out = {each.name for each in out_of(sites, MAPPING, apart)}
    # each has a byte at every other page, from the first site on
    assert [each.site_offset for each in sites if each.name not in out] == [0x2000, 0x4000]
    segments = [ReadOnlySegment(Vaddr(number << 20), FileOffset(0), 1 << 20) for number in range(64)]
    steps = moved(sites, segments, MAPPING, [TEXT])
    assert all(next(steps) is None for _ in range(3))
