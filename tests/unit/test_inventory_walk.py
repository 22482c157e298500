"""One look at directories, by the real process."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stapsdtd.errors import InventoryError
from stapsdtd.inventory.walk import MAX_NAMES, Directory, Exceeding, Found, Known, NewFile, Walk, Watched
from tests.support import children
from tests.unit.test_objects import image

TEXT = b"no ELF file, but long enough to be one if it only began so"
LONG_AGO = 1_000_000_000


def walked(
    *directories: Directory,
    known: bytes = b"",
    left_out: tuple[str, ...] = (),
    is_idle: bool = False,
    max_names: int = MAX_NAMES,
) -> Report:
    walk = Walk(reply_seconds=20, max_names=max_names)
    return Report(walk.found(directories, known, left_out, is_idle=is_idle))


class Report:
    """What was found: paths of new files and of directories that are watched, and fingerprints."""

    def __init__(self, found: Generator[Found]) -> None:
        self.files: dict[str, int] = {}
        self.watched: list[str] = []
        self.known = array("Q")
        self.others = array("Q")
        self.exceeding: list[str] = []
        for each in found:
            match each:
                case NewFile(fingerprint, path, descriptor):
                    assert os.pread(descriptor, 4, 0) == b"\x7fELF"
                    self.files[path] = fingerprint
                case Known(fingerprints, is_new):
                    (self.others if is_new else self.known).extend(fingerprints)
                case Exceeding(path):
                    self.exceeding.append(path)
                case Watched(path, mtime_ns, is_any_owner, descriptor):
                    assert os.fstat(descriptor).st_mtime_ns == mtime_ns
                    assert is_any_owner
                    self.watched.append(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "deep/er/two", "deep/three.py", "deep/four.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(b"probe"))
    for path in (tmp_path / "text", tmp_path / "deep" / "text"):
        path.write_bytes(TEXT)
        os.utime(path, (LONG_AGO, LONG_AGO))
    return tmp_path


def test_elf_files_are_found_and_their_directories_watched(folder: Path) -> None:
    (folder / "no" / "such" / "files").mkdir(parents=True)
    report = walked(Directory(str(folder), is_any_owner=True))
    assert set(report.files) == {f"{folder}/one", f"{folder}/deep/er/two"}
    # packages may come into the first two, and there is nothing in no/such
    assert set(report.watched) == {str(folder), f"{folder}/deep", f"{folder}/deep/er", f"{folder}/no"}


def test_only_what_is_named_is_looked_at(folder: Path) -> None:
    report = walked(Directory(str(folder), is_deep=False, is_any_owner=True))
    assert list(report.files) == [f"{folder}/one"]
    report = walked(Directory(str(folder), is_any_owner=True), left_out=(f"{folder}/deep",))
    assert list(report.files) == [f"{folder}/one"]
    assert not walked(Directory(f"{folder}/deep/er", is_any_owner=True), left_out=(f"{folder}/deep",)).files
    assert not walked(Directory(f"{folder}/missing", is_any_owner=True)).watched


@pytest.mark.parametrize("is_idle", [False, True])
def test_known_files_are_not_read_again(folder: Path, is_idle: bool) -> None:
    directory = Directory(str(folder), is_any_owner=True)
    first = walked(directory, is_idle=is_idle)
    known = array("Q", first.files.values()).tobytes()
    again = walked(directory, known=known, is_idle=is_idle)
    assert not again.files
    assert sorted(again.known) == sorted(first.files.values())
    assert sorted(again.watched) == sorted(first.watched)


CHANGES: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    lambda path: os.utime(path, (LONG_AGO, LONG_AGO)),
    lambda path: path.chmod(0o711),
    lambda path: shutil.copy2(path, path.with_name("copy")) and path.with_name("copy").rename(path),
]


@pytest.mark.parametrize("change", CHANGES, ids=["size", "modified", "changed", "replaced"])
def test_changed_file_is_new(folder: Path, change: Callable[[Path], object]) -> None:
    directory = Directory(str(folder), is_any_owner=True)
    known = array("Q", walked(directory).files.values()).tobytes()
    change(folder / "one")
    assert list(walked(directory, known=known).files) == [f"{folder}/one"]


def test_files_that_are_no_elf_are_known_once_they_rest(folder: Path) -> None:
    """Their content changed long ago, but not their status: they may have been written to a moment ago."""
    directory = Directory(str(folder), is_any_owner=True)
    assert not walked(directory).others
    # of this one the scripts are as old as the host
    found = Walk(reply_seconds=20).found([Directory("/usr/bin", is_deep=False)], b"")
    assert any(each.is_new and each.fingerprints for each in found if isinstance(each, Known))


@pytest.mark.parametrize(
    ("owner", "mode", "is_trusted"),
    [(0, 0o755, True), (65534, 0o755, False), (0, 0o757, False), (0, 0o775, False)],
    ids=["root's", "a user's", "everybody's", "a group's"],
)
@pytest.mark.parametrize("what", ["one", ""], ids=["file", "directory"])
def test_only_what_root_alone_can_change_is_trusted(
    trusted: Path, what: str, owner: int, mode: int, is_trusted: bool
) -> None:
    (trusted / "one").write_bytes(image(b"probe"))
    os.chown(trusted / what, owner, 65534)
    (trusted / what).chmod(mode)
    found = Walk(reply_seconds=20).found([Directory(str(trusted))], b"")
    paths = [each.path for each in found if isinstance(each, NewFile)]
    assert paths == ([f"{trusted}/one"] if is_trusted else [])


@pytest.fixture
def trusted() -> Iterator[Path]:
    """A folder that none but root can put another in the place of."""
    with tempfile.TemporaryDirectory(dir="/var/lib") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def test_directory_with_too_many_names_costs_the_others_nothing(tmp_path: Path) -> None:
    for name in ("full", "other"):
        (tmp_path / name).mkdir()
        for number in range(6 if name == "full" else 5):
            (tmp_path / name / str(number)).write_bytes(image(b"probe"))
    directories = [Directory(str(tmp_path / name), is_any_owner=True) for name in ("full", "other")]
    report = walked(*directories, max_names=5)
    assert report.exceeding == [f"{tmp_path}/full"]
    # what has been found in it stays
    assert len([path for path in report.files if path.startswith(f"{tmp_path}/full/")]) == 5
    assert len([path for path in report.files if path.startswith(f"{tmp_path}/other/")]) == 5


@pytest.mark.parametrize("is_deep_first", [True, False])
def test_deep_look_supersedes_another(folder: Path, is_deep_first: bool) -> None:
    looks = [
        Directory(str(folder), is_deep=is_deep, is_any_owner=True) for is_deep in (is_deep_first, not is_deep_first)
    ]
    found = Walk(reply_seconds=20).found(looks, b"")
    files = sorted(each.path for each in found if isinstance(each, NewFile))
    assert files == [f"{folder}/deep/er/two", f"{folder}/one"]


def test_what_is_not_trusted_is_found_where_anybody_may_have_put_it(trusted: Path) -> None:
    for name, owner in (("one", 0), ("two", 65534)):
        (trusted / name).write_bytes(image(b"probe"))
        os.chown(trusted / name, owner, 0)
    looks = [Directory(str(trusted)), Directory(str(trusted), is_any_owner=True)]
    found = Walk(reply_seconds=20).found(looks, b"")
    assert sorted(each.path for each in found if isinstance(each, NewFile)) == [f"{trusted}/one", f"{trusted}/two"]


def test_nothing_but_regular_files_is_opened(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "one")
    (folder / "loop").symlink_to(folder)
    report = walked(Directory(str(folder), is_any_owner=True))
    assert set(report.files) == {f"{folder}/one", f"{folder}/deep/er/two"}


def test_named_link_is_followed_to_its_directory(folder: Path) -> None:
    link = folder / "link"
    link.symlink_to("deep")
    assert list(walked(Directory(str(link), is_any_owner=True)).files) == [f"{folder}/deep/er/two"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit()", "the process that looks for files ended"),
        ("import time; time.sleep(100)", "a file system does not reply"),
    ],
)
def test_failures_are_told(code: str, reason: str) -> None:
    walk = Walk(reply_seconds=0.5, command=(sys.executable, "-c", code))
    with pytest.raises(InventoryError, match=reason):
        list(walk.found([Directory("/usr/bin")], b""))
    assert not walk.is_running


@pytest.mark.parametrize(("is_idle", "policy"), [(False, os.SCHED_OTHER), (True, os.SCHED_IDLE)])
def test_scan_runs_at_idle_priority(is_idle: bool, policy: int) -> None:
    before = children()
    with closing(Walk(reply_seconds=20).found([Directory("/usr/lib")], b"", is_idle=is_idle)) as found:
        next(found)
        (pid,) = children() - before
        assert os.sched_getscheduler(pid) == policy
    assert children() == before


def test_stopped_walk_ends(folder: Path) -> None:
    walk = Walk(reply_seconds=20)
    found = walk.found([Directory(str(folder), is_any_owner=True)], b"")
    next(found)
    walk.stop()
    with pytest.raises(InventoryError, match="ended"):
        list(found)
    assert not walk.is_running


_HELD_UP = """
import os, select, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
if os.fork() == 0:
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll(60_000)
    os._exit(0)
connection.send(b"k")
select.poll().poll(60_000)
"""
"""Its socket stays open when it is killed, as does that of a process that a file system holds up."""


def test_stop_does_not_wait_for_a_file_system(folder: Path) -> None:
    walk = Walk(reply_seconds=60, command=(sys.executable, "-c", _HELD_UP))
    found = walk.found([Directory(str(folder), is_any_owner=True)], b"")
    next(found)
    threading.Timer(0.1, walk.stop).start()
    began = time.monotonic()
    with pytest.raises(InventoryError, match="ended"):
        next(found)
    assert time.monotonic() - began < 10
