"""Armed files that are written to: a real inotify on files of this process's own."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.kernel.host_calls import INOTIFY
from stapsdtd.model import ObjectKey
from stapsdtd.sessions.file_writes import FileWriteWatcher

SECONDS = 20


class Told:
    """What FileWriteWatcher told, in the order of the writes."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[set[ObjectKey]] = asyncio.Queue()
        self.writes = FileWriteWatcher(self.news.put_nowait)

    async def next(self) -> set[ObjectKey]:
        return await asyncio.wait_for(self.news.get(), SECONDS)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing inside."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def write(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def key(number: int) -> ObjectKey:
    return ObjectKey(1, number, 0, 0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("one", "two", "three")]
    for each in found:
        each.touch()
    return found


def test_who_writes_to_an_armed_file_is_noticed(files: list[Path]) -> None:
    async def work() -> None:
        told = Told()
        told.writes.armed(key(1), str(files[0]))
        told.writes.armed(key(2), str(files[1]))
        write(files[0])
        assert await told.next() == {key(1)}
        write(files[1])
        assert await told.next() == {key(2)}
        told.writes.close()

    asyncio.run(work())


def test_as_often_as_it_was_armed_it_has_to_be_disarmed(files: list[Path]) -> None:
    async def work() -> None:
        told = Told()
        for each in (1, 1, 2):
            told.writes.armed(key(each), str(files[each - 1]))
        told.writes.disarmed(key(1))
        write(files[0])
        assert await told.next() == {key(1)}
        told.writes.disarmed(key(1))
        write(files[0])
        write(files[1])
        assert await told.next() == {key(2)}
        told.writes.armed(key(1), str(files[0]))
        write(files[0])
        assert await told.next() == {key(1)}
        told.writes.close()

    asyncio.run(work())


def test_versions_of_one_file_are_told_apart(files: list[Path]) -> None:
    """As when another subscription still has the earlier one."""

    async def work() -> None:
        told = Told()
        told.writes.armed(key(1), str(files[0]))
        told.writes.armed(key(2), str(files[0]))
        write(files[0])
        assert await told.next() == {key(1), key(2)}
        told.writes.disarmed(key(1))
        write(files[0])
        assert await told.next() == {key(2)}
        told.writes.close()

    asyncio.run(work())


def test_too_many_writes_to_be_told_are_writes_to_all(files: list[Path]) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())

    async def work() -> None:
        told = Told()
        for number, each in enumerate(files):
            told.writes.armed(key(number), str(each))
        with files[0].open("ab", buffering=0) as first, files[1].open("ab", buffering=0) as second:
            # in turns, since equal events in a row are queued as one
            for _ in range(most // 2 + 1):
                first.write(b"x")
                second.write(b"x")
        assert await told.next() == {key(0), key(1), key(2)}
        told.writes.close()

    asyncio.run(work())


def test_a_file_that_is_gone_or_a_host_without_inotify_is_borne(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        told = Told()
        told.writes.armed(key(1), str(files[0].with_name("gone")))
        told.writes.disarmed(key(1))
        told.writes.close()
        with no_descriptor_left():
            told = Told()
        told.writes.armed(key(1), str(files[0]))
        told.writes.disarmed(key(1))
        told.writes.close()

    asyncio.run(work())
    refused = INOTIFY.refused("files (inotify_init1)", errno.EMFILE)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"a file that is rewritten in place is noticed some seconds later: {refused}"
    ]
