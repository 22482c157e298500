"""Pages of a child are brought in from outside; its page table tells which are there."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.inodes import MappedInode
from stapsdtd.kernel.process_memory import LocalMemory, touch

PAGE = mmap.PAGESIZE
PAGES = 4


class Child:
    """Has a copy of this process's memory, of which it looks at nothing."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.pid = os.fork()
        if not self.pid:
            signal.pause()
            os._exit(0)

    def present(self) -> list[int]:
        """Which pages are there, by bit 63 (Documentation/admin-guide/mm/pagemap.rst)."""
        with Path(f"/proc/{self.pid}/pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(self.address // PAGE * 8)
            entries = pagemap.read(8 * PAGES)
        return [page for page in range(PAGES) if entries[8 * page + 7] & 0x80]


@contextmanager
def child_with(memory: mmap.mmap) -> Iterator[Child]:
    made = Child(memory)
    try:
        yield made
    finally:
        os.kill(made.pid, signal.SIGKILL)
        os.waitpid(made.pid, 0)


@pytest.mark.parametrize(
    ("begin", "byte_count", "expected"),
    [
        (0, 1, [0]), (PAGE - 1, 1, [0]), (PAGE - 1, 2, [0, 1]), (PAGE, PAGE, [1]), (PAGE + 1, PAGE, [1, 2]),
        (0, PAGES * PAGE, [0, 1, 2, 3]), (3 * PAGE, 0, [3]),
    ],
)  # fmt: skip
def test_those_pages_are_there_afterwards_and_no_others(begin: int, byte_count: int, expected: list[int]) -> None:
    with child_with(mmap.mmap(-1, PAGES * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as child:
        assert child.present() == []
        touch(child.pid, child.address + begin, byte_count)
        assert child.present() == expected


def test_page_of_a_file_that_only_the_child_has_mapped_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * PAGES * PAGE)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), PAGES * PAGE, mmap.MAP_PRIVATE)
    with child_with(memory) as child:
        assert child.present() == []
        touch(child.pid, child.address + PAGE + 5, 8)
        # and what else of it is in the page cache around
        assert 1 in child.present()


def test_memory_that_is_not_there_is_an_error() -> None:
    with child_with(mmap.mmap(-1, PAGES * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as child:
        for address in (0, 8, (1 << 56) - 1):
            with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
                touch(child.pid, address, 8)


def test_process_that_is_gone_is_an_error() -> None:
    with child_with(mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as child:
        pass
    with pytest.raises(ProcessLookupError):
        touch(child.pid, child.address, 8)


class _Served(Filesystems):
    def why_not(self, descriptor: int, pid: int, inode: MappedInode | None = None) -> str | None:  # noqa: ARG002
        return "somebody serves it"


def test_how_far_memory_may_be_touched(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * PAGES * PAGE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), PAGES * PAGE, mmap.MAP_PRIVATE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        local, served = LocalMemory(Filesystems()), LocalMemory(_Served())
        assert local.local_bytes(os.getpid(), address + 5) == PAGES * PAGE - 5
        assert served.local_bytes(os.getpid(), address + 5) == 0
        with mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as anonymous:
            own = ctypes.addressof(ctypes.c_char.from_buffer(anonymous))
            assert served.local_bytes(os.getpid(), own) >= PAGE
        assert local.local_bytes(os.getpid(), 1) == 0
        gc.collect()
