"""Pages of a child are brought in from outside; mincore(2) tells which are there."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.kernel.process_memory import touch

PAGE = mmap.PAGESIZE
PAGES = 4
FAR_BEYOND = 1 << 56


class Child:
    """Maps PAGES of a file that nobody has read, and sleeps."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"x" * PAGES * PAGE)
        self._descriptor = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(self._descriptor, PAGES * PAGE, mmap.MAP_SHARED)
        # so that none of its pages is in anybody's page tables, and the child's faults are its own
        self._memory.madvise(mmap.MADV_DONTNEED)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pid = os.fork()
        if not self.pid:
            signal.pause()
            os._exit(0)

    def present(self) -> list[bool]:
        """Which pages are in the child's page tables, by bit 63 (Documentation/admin-guide/mm/pagemap.rst)."""
        with Path(f"/proc/{self.pid}/pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(self.address // PAGE * 8)
            entries = pagemap.read(8 * PAGES)
        return [bool(entries[at + 7] & 0x80) for at in range(0, 8 * PAGES, 8)]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._descriptor)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(tmp_path / "file")
    yield made
    made.end()


@pytest.mark.parametrize(
    ("begin", "byte_count", "expected"),
    [
        (0, 1, [0]), (PAGE - 1, 1, [0]), (PAGE - 1, 2, [0, 1]), (PAGE, PAGE, [1]), (PAGE + 1, PAGE, [1, 2]),
        (0, PAGES * PAGE, [0, 1, 2, 3]), (3 * PAGE, 0, [3]),
    ],
)  # fmt: skip
def test_each_page_is_there_afterwards(child: Child, begin: int, byte_count: int, expected: list[int]) -> None:
    if child.present() != [False] * PAGES:
        pytest.fail("the pages are there before anybody looked at them")
    touch(child.pid, child.address + begin, byte_count)
    present = child.present()
    assert all(present[page] for page in expected)
