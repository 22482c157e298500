"""Files that clients name, opened by a process of their own with this process's rights."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.errors import FileRefusedError, LimitReachedError, ObjectPendingError
from stapsdtd.model import ObjectKey, ParsedObject
from stapsdtd.procs.file_opener import COMMAND, FileOpener
from stapsdtd.procs.named_files import Credentials, NamedFiles
from stapsdtd.procs.objects import Parse
from stapsdtd.procs.opened_files import Bounds
from tests.support import children, descriptors, wait_for, without_descriptors
from tests.unit.elf_builder import Elf
from tests.unit.test_objects import image, parse_here

ME = Credentials("me", None, frozenset(), os.getpid())


@contextmanager
def opener(
    parse: Parse = parse_here, *, bounds: Bounds | None = None, command: tuple[str, ...] = COMMAND
) -> Iterator[FileOpener]:
    made = FileOpener(parse, bounds=bounds or Bounds(), command=command)
    try:
        yield made
    finally:
        made.close()


def named(*paths: Path | str, bounds: Bounds | None = None, parse: Parse = parse_here) -> NamedFiles:
    with opener(parse, bounds=bounds) as files:
        return asyncio.run(files.open(list(map(str, paths)), ME))


def why_refused(*paths: Path | str) -> str:
    with pytest.raises(FileRefusedError) as raised:
        named(*paths)
    return str(raised.value)


def paths_of(found: NamedFiles) -> list[str]:
    return [file.path for file in found.files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two programs with notes, and what none may be found in."""
    (tmp_path / "one").write_bytes(image(b"one"))
    (tmp_path / "two").write_bytes(image(b"two", b"three"))
    (tmp_path / "text").write_text("#!/bin/sh\n")
    (tmp_path / "plain").write_bytes(Elf(notes=b"").build())
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "deep").write_bytes(image(b"deep"))
    (tmp_path / "link").symlink_to("below/deep")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def test_file(folder: Path) -> None:
    (file,) = named(folder / "two").files
    status = (folder / "two").stat()
    assert file.path == str(folder / "two")
    assert file.key == ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    assert [site.name for site in file.parsed.sites] == ["two", "three"]
    assert os.pread(file.descriptor, 4, 0) == b"\x7fELF"
    assert not os.get_inheritable(file.descriptor)
    assert not file.is_deleted
    (folder / "two").unlink()
    assert file.is_deleted


def test_expected_files_need_not_be_of_use(folder: Path) -> None:
    """That most files have no notes is not worth telling."""
    paths = [folder / name for name in ("plain", "one", "text", "missing", "broken", "fifo", "link")]
    with opener() as files:
        found = asyncio.run(files.open(list(map(str, paths)), ME, are_expected=True))
    assert paths_of(found) == [str(folder / "one"), str(folder / "below" / "deep")]
    unusable = dict(found.unusable)
    assert unusable.pop(str(folder / "broken")).startswith("cannot be parsed: ")
    assert unusable == {
        str(folder / "text"): "not an ELF file",
        str(folder / "missing"): "no such file",
        str(folder / "fifo"): "not a regular file",
    }


_SILENT = """
import os, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
paths = []
while path := connection.recv(1 << 16):
    paths.append(path[1:])
connection.send(b"P" + paths[0])
socket.send_fds(connection, [b"N"], [os.open(paths[0], os.O_PATH)])
{}
"""


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ("__import__('time').sleep(100)", "its file system does not reply"),
        ("connection.send(b'P' + paths[1]); __import__('time').sleep(100)", "its file system does not reply"),
        ("sys.exit()", "cannot be opened: the process that opens files ended; try again"),
    ],
)
def test_expected_files_that_cannot_be_waited_for_cost_the_others_nothing(folder: Path, last: str, reason: str) -> None:
    paths = [f"{folder}/one", f"{folder}/two", f"{folder}/link"]
    command = (sys.executable, "-I", "-S", "-c", _SILENT.format(last))
    with opener(bounds=Bounds(reply_seconds=0.5), command=command) as files:
        found = asyncio.run(files.open(paths, ME, are_expected=True))
    assert paths_of(found) == paths[:1]
    assert dict(found.unusable) == dict.fromkeys(paths[1:], reason)


def test_expected_files_are_of_no_use_when_time_is_up(folder: Path) -> None:
    with opener(bounds=Bounds(all_seconds=0)) as files:
        found = asyncio.run(files.open([f"{folder}/one", f"{folder}/two"], ME, are_expected=True))
    assert not found.files
    assert dict(found.unusable) == dict.fromkeys([f"{folder}/one", f"{folder}/two"], "takes longer than 0 s to read")


def test_directory_means_the_files_in_it(folder: Path) -> None:
    found = named(folder)
    assert paths_of(found) == [str(folder / "one"), str(folder / "two")]
    # one that comes to be there later is meant, too
    assert str(folder) in found.paths


def test_globs(folder: Path) -> None:
    assert paths_of(named(f"{folder}/[bo]*")) == [str(folder / "one")]
    assert paths_of(named(f"{folder}/*/d??p")) == [str(folder / "below" / "deep")]
    (folder / "o[n]e").write_bytes(image(b"odd"))
    assert paths_of(named(folder / "o[n]e")) == [str(folder / "o[n]e")]


def test_path_is_followed_and_each_file_is_opened_once(folder: Path) -> None:
    os.link(folder / "one", folder / "other")
    found = named(
        folder / "link", folder / "one", folder / "below" / ".." / "other", f"/proc/{os.getpid()}/root{folder}/*e"
    )
    assert paths_of(found) == [str(folder / "below" / "deep"), str(folder / "one")]


def test_root_of_a_process(folder: Path) -> None:
    (file,) = named(f"/proc/{os.getpid()}/root{folder}/link").files
    assert file.path == str(folder / "below" / "deep")
    assert file.viewer == os.getpid()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("{}/none", "no such file"),
        ("{}/one/two", "no such file"),
        ("{}/text", "not an ELF file"),
        ("{}/plain", "has no stapsdt note"),
        ("{}/broken", "cannot be parsed: "),
        ("{}/fifo", "not a regular file"),
        ("/dev/null", "not a regular file"),
        ("{}/empty", "no ELF file there has a stapsdt note"),
        ("{}/pl*", "no ELF file there has a stapsdt note"),
        ("{}/x*", "no ELF file that you may read matches"),
        ("/proc/self/exe", "leads through a link of /proc, of which only /proc/PID/root can be followed"),
        ("{}/loop", "too many symbolic links"),
        ("/proc/4194305/root/bin/sh", "no such file"),
    ],
)
def test_refusals_name_the_path(folder: Path, path: str, reason: str) -> None:
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to("loop")
    path = path.format(folder)
    refusal = why_refused(folder / "one", path)
    assert refusal.startswith(f"{path}: {reason}")


def test_bounds(folder: Path) -> None:
    assert len(named(folder, bounds=Bounds(files=2, notes=3)).files) == 2
    with pytest.raises(LimitReachedError, match="too many files: more than 1 have stapsdt notes"):
        named(folder, bounds=Bounds(files=1))
    with pytest.raises(LimitReachedError, match="too many probes: more than 2 stapsdt notes"):
        named(folder, bounds=Bounds(notes=2))
    with pytest.raises(FileRefusedError, match="takes longer than 0 s to read"):
        named(folder, bounds=Bounds(all_seconds=0))


def test_many_names_are_looked_at(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"text{number}").write_text("#!/bin/sh\n")
    (tmp_path / "zzz").write_bytes(image(b"last"))
    assert paths_of(named(tmp_path, f"{tmp_path}/*")) == [str(tmp_path / "zzz")]


def test_server_without_descriptors_says_so(folder: Path) -> None:
    with opener() as files:

        async def opened() -> NamedFiles:
            with without_descriptors():
                return await files.open([str(folder / "one")], ME)

        with pytest.raises(LimitReachedError, match=r"cannot open more files: .*: Too many open files; .*LimitNOFILE"):
            asyncio.run(opened())


def late(calls: int) -> Parse:
    """A parser that has a result the call after so many."""
    left = calls

    def parse(descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        nonlocal left
        assert (pid, owner) == (os.getpid(), os.geteuid())
        left -= 1
        if left >= 0:
            raise ObjectPendingError
        return parse_here(descriptor, pid)

    return parse


def test_slow_file_is_waited_for(folder: Path) -> None:
    assert len(named(folder / "one", parse=late(2)).files) == 1
    with pytest.raises(FileRefusedError, match="takes long to parse; try again"):
        named(folder / "one", parse=late(2), bounds=Bounds(parse_seconds=0))


def test_file_that_is_written_to_meanwhile_is_refused(folder: Path) -> None:
    def parse(descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:
        parsed = parse_here(descriptor, pid, owner)
        os.utime(folder / "one", ns=(1, 1))
        return parsed

    with pytest.raises(FileRefusedError, match="was written to while it was read; try again"):
        named(folder / "one", parse=parse)


def test_nothing_stays_open(folder: Path) -> None:
    named(folder / "one")
    gc.collect()
    before = descriptors(os.getpid())
    found = named(folder)
    assert descriptors(os.getpid()) == before + 2
    del found
    why_refused(folder, "/none")
    wait_for(lambda: descriptors(os.getpid()) == before, "what was found before the refusal to be closed")
    assert children() == set()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time; time.sleep(100)", "its file system does not reply"),
        ("", "cannot be opened: the process that opens files ended; try again"),
    ],
    ids=["hangs", "ends"],
)
def test_process_that_fails(program: str, reason: str) -> None:
    with (
        opener(bounds=Bounds(reply_seconds=0.2), command=(sys.executable, "-I", "-S", "-c", program)) as files,
        pytest.raises(FileRefusedError) as raised,
    ):
        asyncio.run(files.open(["/far"], ME))
    assert str(raised.value) == f"/far: {reason}"
    assert children() == set()


def test_request_that_is_given_up_keeps_its_turn_until_it_ends(folder: Path) -> None:
    order: list[str] = []

    def told(name: str) -> Parse:
        def parse(descriptor: int, pid: int, owner: int | None = None) -> ParsedObject:  # noqa: ARG001
            order.append(name)
            return parse_here(descriptor, pid)

        return parse

    async def both() -> None:
        with opener(told("parsed")) as files:
            first = asyncio.create_task(files.open([str(folder)], ME))
            await asyncio.sleep(0)
            first.cancel()
            second = await files.open([str(folder / "one")], ME)
            order.append("second")
            assert len(second.files) == 1
            assert first.cancelled()

    asyncio.run(both())
    assert order == ["parsed"] * 5 + ["second"]


def test_closing_ends_what_goes_on() -> None:
    async def close(files: FileOpener) -> None:
        opening = asyncio.create_task(files.open(["/far"], ME))
        await asyncio.to_thread(wait_for, children, "the process to begin")
        files.close()
        with pytest.raises(FileRefusedError, match="the process that opens files ended"):
            await opening

    hanging = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)")
    asyncio.run(close(FileOpener(parse_here, command=hanging)))
    assert children() == set()
