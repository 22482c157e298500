"""Constants from a file that a test writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stapsdtd.capture.bpf.constants import ReadOnlyFile, SiteConstants
from stapsdtd.events.columns import CUT
from stapsdtd.model import FileOffset, ReadOnlySegment, Vaddr

ALL_BITS = (1 << 64) - 1


class Calls:
    """The module os; errors: what its functions raise, by name. advised: the arguments of posix_fadvise."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.advised: list[tuple[int, int, int]] = []

    def _fail(self, name: str) -> None:
        if number := self.errors.get(name):
            raise OSError(number, os.strerror(number))

    def preadv(self, fd: int, buffers: list[bytearray], offset: int, flags: int, /) -> int:
        self._fail("preadv")
        return os.preadv(fd, buffers, offset, flags)

    def pread(self, fd: int, length: int, offset: int, /) -> bytes:
        self._fail("pread")
        return os.pread(fd, length, offset)

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int, /) -> None:
        self._fail("posix_fadvise")
        self.advised.append((offset, length, advice))
        os.posix_fadvise(fd, offset, length, advice)


TEXT = ReadOnlySegment(Vaddr(0x401000), FileOffset(0x1000), 0x800)
RODATA = ReadOnlySegment(Vaddr(0x500000), FileOffset(0x2000), 0x100)
SITE = FileOffset(0x1010)
SITE_VADDR = 0x401010


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """At 0x2010 a text, another one behind it, and one at the segment's end without a NUL; then what is not its."""
    content = bytearray(0x3000)
    content[0x2010:0x201F] = b"a text\0another\0"
    content[0x20F8:0x2110] = b"not ends" + b"further data\0\0\0\0"
    (tmp_path / "app").write_bytes(content)
    opened = os.open(tmp_path / "app", os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def constants(descriptor: int, calls: Calls) -> SiteConstants:
    found = SiteConstants.around(ReadOnlyFile(descriptor, [TEXT, RODATA], calls=calls), SITE)
    assert found is not None
    return found


def distance(vaddr: int) -> int:
    return (vaddr - SITE_VADDR) & ALL_BITS


def has(constants: SiteConstants, *vaddrs: int) -> list[bool]:
    found: list[bool] = constants.has(np.array([distance(vaddr) for vaddr in vaddrs], np.uint64)).tolist()
    return found


def test_text_is_cut_as_the_program_cuts_it(constants: SiteConstants) -> None:
    there = distance(0x500010)
    assert constants.text(there, 64) == b"a text"
    assert constants.text(there, 6) == b"a text"
    assert constants.text(there, 5) == b"a tex" + CUT
    assert constants.text(distance(0x500016), 64) == b""
    assert constants.text(distance(0x500017), 64) == b"another"


def test_text_that_runs_on_behind_the_segment_is_not_known(constants: SiteConstants) -> None:
    there = distance(0x5000F8)
    assert constants.text(there, 64) is None
    assert constants.text(there, 8) is None
    # what is cut off needs no NUL
    assert constants.text(there, 7) == b"not end" + CUT


def test_raw_bytes_are_there_as_a_whole_or_not_at_all(constants: SiteConstants) -> None:
    assert constants.raw(distance(0x500010), 8) == b"a text\0a"
    assert constants.raw(distance(0x5000F8), 8) == b"not ends"
    assert constants.raw(distance(0x5000F8), 9) is None
    assert constants.raw(distance(0x500100), 1) is None


def test_constants_lie_before_and_behind_the_site(descriptor: int) -> None:
    low = ReadOnlySegment(Vaddr(0x1000), FileOffset(0x2000), 0x100)
    for vaddr in (0x400, SITE_VADDR):
        text = ReadOnlySegment(Vaddr(vaddr - 0x10), FileOffset(0x1000), 0x800)
        constants = SiteConstants.around(ReadOnlyFile(descriptor, [low, text]), SITE)
        assert constants is not None
        assert constants.text((0x1010 - vaddr) & ALL_BITS, 64) == b"a text"


def test_only_what_the_segments_cover_is_there(constants: SiteConstants) -> None:
    assert has(constants, 0x401000, 0x4017FF, 0x500000, 0x5000FF) == [True] * 4
    assert has(constants, 0x400FFF, 0x401800, 0x4FFFFF, 0x500100, 0, ALL_BITS, 1 << 63) == [False] * 7
    for vaddr in (0x400FFF, 0x401800, 0x4FFFFF, 0x500100, 0, ALL_BITS, 1 << 63):
        assert (constants.raw(distance(vaddr), 1), constants.text(distance(vaddr), 0)) == (None, None)


@pytest.mark.parametrize("vaddr", [ALL_BITS, ALL_BITS - 0x7F, 1 << 63, 0])
def test_segments_at_the_edges_of_what_a_hostile_file_says(descriptor: int, vaddr: int) -> None:
    edge = ReadOnlySegment(Vaddr(vaddr), FileOffset(0x2000), 0x100)
    constants = SiteConstants.around(ReadOnlyFile(descriptor, [TEXT, edge]), SITE)
    assert constants is not None
    for step in (0, 0x10, 0x7F, 0x80, 0xFF, 0x100):
        data = constants.raw(distance(vaddr + step), 1)
        assert data is None or has(constants, vaddr + step) == [True]
    assert constants.raw(distance(vaddr), 1) == b"\0"


def test_site_has_constants_only_where_its_segment_is_known(descriptor: int) -> None:
    def around(*segments: ReadOnlySegment, offset: int = SITE) -> SiteConstants | None:
        return SiteConstants.around(ReadOnlyFile(descriptor, segments), FileOffset(offset))

    assert around() is None
    assert around(RODATA) is None
    assert around(TEXT, ReadOnlySegment(Vaddr(0x900000), FileOffset(0), 0x3000)) is None
    assert around(TEXT, offset=0xFFF) is None
    assert around(TEXT, offset=0x1800) is None
    for offset in (0x1000, 0x17FF):
        assert around(TEXT, offset=offset) is not None


def test_file_that_became_shorter_has_no_constants(tmp_path: Path, constants: SiteConstants) -> None:
    os.truncate(tmp_path / "app", 0x2012)
    assert constants.text(distance(0x500010), 64) is None
    assert constants.raw(distance(0x500010), 2) == b"a "
    assert constants.raw(distance(0x500020), 2) is None


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_system_that_cannot_say_whether_it_would_wait_is_read_nevertheless(
    constants: SiteConstants, calls: Calls, number: int
) -> None:
    """Such as overlayfs before it passed RWF_NOWAIT on."""
    calls.errors["preadv"] = number
    assert constants.text(distance(0x500010), 64) == b"a text"


def test_what_would_have_to_be_waited_for_is_had_later(constants: SiteConstants, calls: Calls) -> None:
    calls.errors["preadv"] = errno.EAGAIN
    assert constants.text(distance(0x500010), 64) is None
    assert calls.advised == [(0x2010, 65, os.POSIX_FADV_WILLNEED)]
    calls.errors.clear()
    assert constants.text(distance(0x500010), 64) == b"a text"


def test_file_that_cannot_be_read_has_no_constants(constants: SiteConstants, calls: Calls) -> None:
    calls.errors["preadv"] = errno.EIO
    assert constants.text(distance(0x500010), 64) is None


@pytest.mark.parametrize(("first", "then"), [(errno.EOPNOTSUPP, "pread"), (errno.EAGAIN, "posix_fadvise")])
def test_disk_that_fails_later_costs_nothing_but_the_constant(
    constants: SiteConstants, calls: Calls, first: int, then: str
) -> None:
    calls.errors |= {"preadv": first, then: errno.EIO}
    assert constants.text(distance(0x500010), 64) is None


def test_so_much_is_read_ahead_and_no_more(descriptor: int, calls: Calls) -> None:
    large = [ReadOnlySegment(Vaddr(number << 32), FileOffset(number << 20), 3 << 20) for number in range(3)]
    ReadOnlyFile(descriptor, large, calls=calls).read_ahead()
    assert [(offset, size) for offset, size, _ in calls.advised] == [(0, 3 << 20), (1 << 20, 1 << 20)]
