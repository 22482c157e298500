"""Copies of files, by processes that may be given up."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from stapsdtd.errors import ObjectGoneError, ObjectPendingError
from stapsdtd.kernel import procfs
from stapsdtd.model import Mapping
from stapsdtd.procs.copies import COMMAND, FileCopies
from stapsdtd.procs.objects import Copy
from tests.support import descriptors

PID, USER, OTHER = os.getpid(), 64101, 64102
ENDLESS = (sys.executable, "-c", "import time; time.sleep(1000)")


@contextmanager
def mapped(path: Path) -> Iterator[Mapping]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        (found,) = [mapping for mapping in procfs.executable_mappings(PID) if mapping.path == str(path)]
        yield found


class Host:
    """Takes copies as the watcher does: again when it is told to."""

    def __init__(self, command: tuple[str, ...] = COMMAND, seconds: float = 20) -> None:
        self._told = asyncio.Event()
        self.pids: set[int] = set()
        self.copies = FileCopies(seconds, command)
        self.copies.on_done = self._tell

    def _tell(self, pids: Iterable[int]) -> None:
        self.pids |= set(pids)
        self._told.set()

    async def told(self) -> None:
        await asyncio.wait_for(self._told.wait(), 20)
        self._told.clear()

    async def take(self, mapping: Mapping, user: int = USER) -> Copy:
        while True:
            try:
                return self.copies.take(PID, user, mapping)
            except ObjectPendingError:
                await self.told()


def test_copy_has_what_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 << 20))
    status = path.stat()

    async def copied() -> None:
        host = Host()
        with mapped(path) as mapping:
            copy = await host.take(mapping)
            assert os.pread(copy.descriptor, status.st_size + 1, 0) == path.read_bytes()
            assert (copy.key.dev, copy.key.inode) == (status.st_dev, status.st_ino)
            assert (copy.key.size, copy.key.mtime_ns) == (status.st_size, status.st_mtime_ns)
            # while it is parsed it is asked for again
            assert host.copies.take(PID, USER, mapping) is copy
            host.copies.drop(copy)
            with pytest.raises(ObjectPendingError):
                host.copies.take(PID, USER, mapping)
        host.copies.close()

    before = descriptors(PID)
    asyncio.run(copied())
    assert descriptors(PID) == before


def test_what_cannot_be_copied_is_told_and_not_tried_again_soon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    os.truncate(path, 1 << 30)

    async def refused() -> None:
        host = Host()
        with mapped(path) as mapping:
            with pytest.raises(ObjectGoneError):
                await host.take(mapping)
            with pytest.raises(ObjectGoneError):
                host.copies.take(PID, USER, mapping)
        host.copies.close()

    with caplog.at_level("INFO"):
        asyncio.run(refused())
    assert f"{path} is not parsed: cannot copy it: it has {1 << 30} bytes" in caplog.text


def test_process_that_unmapped_it_says_nothing_of_others(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")

    async def gone() -> None:
        host = Host()
        with mapped(path) as mapping:
            before = structs.replace(mapping, start=mapping.start - 0x1000)
            with pytest.raises(ObjectPendingError):
                host.copies.take(PID, USER, before)
            await host.told()
            assert os.pread((await host.take(mapping)).descriptor, 2, 0) == b"x"
        host.copies.close()

    asyncio.run(gone())


def test_job_without_a_pidfd_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    begun: list[int] = []

    def refuse(pid: int) -> int:
        begun.append(pid)
        raise OSError(errno.ENOMEM, "no memory")

    async def refused() -> None:
        host = Host(ENDLESS)
        with mapped(path) as mapping, pytest.raises(OSError, match="no memory"):
            host.copies.take(PID, USER, mapping)
        host.copies.close()

    before = descriptors(PID)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        asyncio.run(refused())
    assert descriptors(PID) == before
    (pid,) = begun
    assert not os.path.exists(f"/proc/{pid}")


def test_copy_that_cannot_be_taken_is_refused_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")

    async def refused() -> None:
        # it ends well without having said whose copy that is
        host = Host((sys.executable, "-c", ""))
        with mapped(path) as mapping, pytest.raises(ObjectGoneError):
            await host.take(mapping)
        host.copies.close()

    before = descriptors(PID)
    asyncio.run(refused())
    assert descriptors(PID) == before
    assert f"{path} is not parsed: cannot take its copy" in caplog.text


def test_server_that_does_not_reply_costs_its_user_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    for each in (path, other):
        each.write_bytes(b"x")

    async def late() -> None:
        host = Host(ENDLESS, seconds=0.05)
        with mapped(path) as mapping, mapped(other) as others:
            # one process for each user, whatever it maps
            for pid, user, file in (PID, USER, mapping), (PID + 1, USER, others), (PID + 2, OTHER, others):
                with pytest.raises(ObjectPendingError):
                    host.copies.take(pid, user, file)
            while host.pids != {PID, PID + 1, PID + 2}:
                await host.told()
        host.copies.close()

    before = descriptors(PID)
    asyncio.run(late())
    assert descriptors(PID) == before
    assert caplog.text.count("does not reply") == 2
    assert "the user's files on such file systems are not parsed" in caplog.text
    assert {vars(record)["fields"]["uid"] for record in caplog.records if "does not reply" in record.message} == {
        USER,
        OTHER,
    }
