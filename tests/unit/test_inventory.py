"""The inventory's thread, over real directories and a parser that runs here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.errors import InventoryError, ObjectPendingError
from stapsdtd.inventory.files import Change, Index
from stapsdtd.inventory.inventory import Inventory, InventoryState, Pace
from stapsdtd.inventory.parsing import WaitingParser
from stapsdtd.inventory.store import Store
from stapsdtd.inventory.walk import Directory
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.model import ParsedObject
from stapsdtd.sandbox.parser import ParserLostError, TooSlowError
from tests.support import wait_for
from tests.unit.test_objects import image, parse_here


class Parser:
    """A `ScanParser` that counts. error: what it raises instead."""

    def __init__(self) -> None:
        self.parsed = 0
        self.error: Exception | None = None

    def parse(self, descriptor: int) -> ParsedObject:
        if self.error is not None:
            raise self.error
        self.parsed += 1
        return parse_here(descriptor, os.getpid())

    def abort(self) -> None: ...

    def close(self) -> None: ...


class Watched:
    """An inventory of a folder. changes: what it told. error: why what changes cannot be parsed."""

    def __init__(self, folder: Path, state: Path, pace: Pace) -> None:
        self.parser = Parser()
        self.changes: list[Change] = []
        self.error: OSError | None = None
        self.inventory = Inventory(
            [Directory(str(folder), is_any_owner=True)],
            Store(str(state), "1"),
            Filesystems(),
            Index(10, 100),
            self._parse_changed,
            version="1",
            pace=pace,
            scan_parser=lambda: self.parser,
        )
        self.inventory.on_change = self.changes.append

    def _parse_changed(self, descriptor: int, pid: int) -> ParsedObject:
        if self.error is not None:
            raise self.error
        return parse_here(descriptor, pid)

    @property
    def names(self) -> list[str]:
        return sorted(os.path.basename(file.path) for file in self.inventory.files())

    def has(self, *names: str) -> None:
        wait_for(lambda: self.names == sorted(names), f"{names}, not {self.names}")

    def is_current(self) -> None:
        wait_for(lambda: self.inventory.status.state is InventoryState.CURRENT, "the scan")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "one").write_bytes(image(b"one"))
    (folder / "none").write_bytes(image())
    return folder


@contextmanager
def inventory(folder: Path, pace: Pace | None = None) -> Iterator[Watched]:
    watched = Watched(folder, folder.parent / "state", pace or Pace())
    watched.inventory.start()
    try:
        yield watched
    finally:
        watched.inventory.stop()


def test_scan_finds_files_with_probes(folder: Path) -> None:
    before = time.time()
    with inventory(folder) as watched:
        watched.is_current()
        (file,) = watched.inventory.files()
        assert (file.path, file.probes, file.sites) == (f"{folder}/one", (("app", "one"),), 1)
        assert watched.changes == [Change(installed=(file,))]
        status = watched.inventory.status
        assert (status.files, status.probes, status.problem) == (1, 1, "")
        assert before <= status.scanned_at <= time.time()


def test_changes_are_noticed(folder: Path) -> None:
    with inventory(folder) as watched:
        watched.is_current()
        (folder / "two").write_bytes(image(b"two"))
        watched.has("one", "two")
        (folder / "part").write_bytes(image(b"three"))
        (folder / "part").rename(folder / "none")
        watched.has("none", "one", "two")
        (folder / "one").write_bytes(image())
        watched.has("none", "two")
        (folder / "two").unlink()
        watched.has("none")
        (folder / "none").rename(folder / "moved")
        watched.has("moved")


def test_new_directories_are_looked_into(folder: Path) -> None:
    with inventory(folder) as watched:
        watched.is_current()
        (folder / "package" / "deep").mkdir(parents=True)
        (folder / "package" / "deep" / "two").write_bytes(image(b"two"))
        watched.has("one", "two")
        (folder / "package" / "deep" / "three").write_bytes(image(b"three"))
        watched.has("one", "three", "two")
        (folder / "package").rename(folder.parent / "elsewhere")
        watched.has("one")


def test_directories_of_known_files_are_watched_after_a_restart(folder: Path) -> None:
    deep = folder / "a" / "package" / "deep"
    deep.mkdir(parents=True)
    (deep / "two").write_bytes(image(b"two"))
    with inventory(folder) as watched:
        watched.is_current()
    with inventory(folder) as watched:
        watched.is_current()
        assert watched.names == ["one", "two"]
        (deep / "three").write_bytes(image(b"three"))
        watched.has("one", "three", "two")


def test_directory_that_replaces_another_is_looked_into(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "two").write_bytes(image(b"two"))
    new = folder.parent / "new"
    (new / "deep").mkdir(parents=True)
    (new / "deep" / "three").write_bytes(image(b"three"))
    with inventory(folder) as watched:
        watched.is_current()
        watched.has("one", "two")
        (folder / "package" / "two").unlink()
        (folder / "package").rmdir()
        new.rename(folder / "package")
        watched.has("one", "three")


@pytest.mark.parametrize("error", [ParserLostError("was ended by SIGKILL"), TooSlowError("takes longer")])
def test_file_that_was_not_parsed_to_its_end_is_read_again(folder: Path, error: Exception) -> None:
    settle(folder)
    watched = Watched(folder, folder.parent / "state", Pace(rescan_seconds=0.05))
    watched.parser.error = error
    watched.inventory.start()
    try:
        watched.is_current()
        assert not watched.names
        watched.parser.error = None
        watched.has("one")
    finally:
        watched.inventory.stop()


def test_file_that_there_was_no_room_for_is_read_again(folder: Path) -> None:
    for number in range(10):
        (folder / f"more{number}").write_bytes(image(b"more"))
    settle(folder)
    with inventory(folder) as watched:
        watched.is_current()
        (left_out,) = {"one", *(f"more{number}" for number in range(10))} - set(watched.names)
        for name in watched.names[:5]:
            (folder / name).unlink()
        wait_for(lambda: left_out in watched.names, f"{left_out} to be read again")


def test_restart_reads_only_what_changed(folder: Path) -> None:
    with inventory(folder) as watched:
        watched.is_current()
        assert watched.parser.parsed == 2
    settle(folder)
    with inventory(folder) as watched:
        watched.is_current()
    (folder / "two").write_bytes(image(b"two"))
    (folder / "one").unlink()
    with inventory(folder) as watched:
        # what was known is told before the scan
        watched.is_current()
        watched.has("two")
        assert watched.parser.parsed == 1
        installed = [[os.path.basename(file.path) for file in change.installed] for change in watched.changes]
        removed = [os.path.basename(file.path) for change in watched.changes for file in change.removed]
        assert (installed[0], removed) == (["one"], ["one"])


def settle(folder: Path) -> None:
    """Until the files without probes changed so long ago that their fingerprints tell."""
    newest = max(path.stat().st_ctime for path in folder.iterdir())
    wait_for(lambda: time.time() - newest > 1.1, "the files to be a second old")


def test_file_without_probes_is_read_again_until_it_is_at_rest(folder: Path) -> None:
    """It may have been written to within the same tick of the file system's clock, without a trace."""
    with inventory(folder) as watched:
        watched.is_current()
    with inventory(folder) as watched:
        watched.is_current()
        assert watched.parser.parsed == 1


def test_failed_scan_is_told_and_tried_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(folder, folder.parent / "state", Pace(retry_seconds=0.05))
    watched.parser.error = OSError("the sandbox does not start")
    watched.inventory.start()
    try:
        wait_for(lambda: watched.inventory.status.state is InventoryState.FAILED, "the scan to fail")
        assert watched.inventory.status.problem == "the sandbox does not start"
        assert "installed files cannot be looked for: the sandbox does not start" in caplog.text
        watched.parser.error = None
        watched.is_current()
        watched.has("one")
        assert watched.inventory.status.problem == ""
    finally:
        watched.inventory.stop()


def test_change_that_cannot_be_looked_at_makes_for_another_scan(folder: Path) -> None:
    with inventory(folder, Pace(retry_seconds=0.05)) as watched:
        watched.is_current()
        watched.error = OSError("the sandbox does not start")
        first = watched.inventory.status.scanned_at
        (folder / "two").write_bytes(image(b"two"))
        wait_for(lambda: watched.inventory.status.scanned_at > first, "another scan")
        watched.has("one", "two")


def test_full_index_is_told(folder: Path) -> None:
    for number in range(10):
        (folder / f"more{number}").write_bytes(image(b"more"))
    with inventory(folder) as watched:
        watched.is_current()
        assert len(watched.names) == 10
        assert watched.inventory.status.problem == "1 files are left out, beyond its bounds"


def test_scans_come_again(folder: Path) -> None:
    """For what no watch reports, such as a directory's own removal."""
    with inventory(folder, Pace(rescan_seconds=0.05)) as watched:
        watched.is_current()
        first = watched.inventory.status.scanned_at
        wait_for(lambda: watched.inventory.status.scanned_at > first, "the next scan")


def test_state_that_cannot_be_kept_is_no_failure(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "state").write_text("in the way")
    with inventory(folder) as watched:
        watched.is_current()
        watched.has("one")
    assert "the next start reads files once more: write " in caplog.text


def test_inventory_without_directories_is_off() -> None:
    inventory = Inventory((), Store("/none", "1"), Filesystems(), Index(1, 1), parse_here, version="1")
    assert not inventory.is_on
    inventory.start()
    assert inventory.status.state is InventoryState.OFF
    inventory.stop()


def test_stop_interrupts_a_scan(folder: Path) -> None:
    begun, stopping = threading.Event(), threading.Event()

    class Slow(Parser):
        def parse(self, descriptor: int) -> ParsedObject:
            begun.set()
            assert stopping.wait(20)
            raise InventoryError(f"aborted at {descriptor}")

        def abort(self) -> None:
            stopping.set()

    watched = Watched(folder, folder.parent / "state", Pace())
    watched.parser = Slow()
    watched.inventory.start()
    assert begun.wait(20)
    watched.inventory.stop()
    assert stopping.is_set()


def test_waits_for_files_that_are_still_being_parsed() -> None:
    calls = iter([ObjectPendingError(), ObjectPendingError(), None])

    def parse(descriptor: int, _pid: int) -> ParsedObject:
        if (error := next(calls)) is not None:
            raise error
        return ParsedObject(f"descriptor {descriptor}", None, (), ())

    is_stopping = threading.Event()
    assert WaitingParser(parse, is_stopping).parse(7).architecture == "descriptor 7"

    def never(_descriptor: int, _pid: int) -> ParsedObject:
        is_stopping.set()
        raise ObjectPendingError

    with pytest.raises(InventoryError, match="stops"):
        WaitingParser(never, is_stopping).parse(7)
