"""btrfs: stat shows a device for each subvolume, the kernel one for all, and snapshots have the same inode numbers."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kernel.test_one_image import container, delivered, fire
from tests.kernel.test_overlays import overlay
from tests.support import TICKER, Daemon, Recorder, Ticker, compile_target, require

pytestmark = pytest.mark.kernel

SELECTOR = f"{TICKER}:ticker::tick(arg0)"


@pytest.fixture
def subvolumes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An image in a subvolume, and a snapshot of it."""
    require(shutil.which("mkfs.btrfs"), "mkfs.btrfs (apt-get install btrfs-progs)")
    require("btrfs" in Path("/proc/filesystems").read_text(), "a kernel with btrfs")
    disk, root = tmp_path / "disk", tmp_path / "root"
    root.mkdir()
    with disk.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.btrfs", "--quiet", str(disk)], check=True)
    subprocess.run(["mount", "-o", "loop", str(disk), str(root)], check=True)
    try:
        image, snapshot = root / "image", root / "snapshot"
        subprocess.run(["btrfs", "--quiet", "subvolume", "create", str(image)], check=True)
        for name in ("bin", "old"):
            (image / name).mkdir()
        static = ("-static", "-ldl", "-lpthread", "-Wl,--no-warnings")
        compile_target("ticker.c", image / "bin" / "ticker", f"-DPROVIDER={TICKER}", *static)
        subprocess.run(["btrfs", "--quiet", "subvolume", "snapshot", str(image), str(snapshot)], check=True)
        yield image, snapshot
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_snapshots_are_files_of_their_own(daemon: Daemon, subvolumes: tuple[Path, Path]) -> None:
    programs = [folder / "bin" / "ticker" for folder in subvolumes]
    statuses = [program.stat() for program in programs]
    assert len({(status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses}) == 1
    with ExitStack() as stack:
        tickers = [stack.enter_context(Ticker(program)) for program in programs * 2]
        with Recorder(daemon.target, SELECTOR) as recorder:
            assert len(recorder.armed()) == 2
            expected = fire(tickers)
        assert delivered(recorder) == expected


def test_named_snapshot_is_that_one(daemon: Daemon, subvolumes: tuple[Path, Path]) -> None:
    """A process that maps it later has it armed; one of the other subvolume stays as it is."""
    image, snapshot = (folder / "bin" / "ticker" for folder in subvolumes)
    with Ticker(image) as other, Recorder(daemon.target, SELECTOR, files=[str(snapshot)]) as recorder:
        assert len(recorder.armed()) == 1
        with Ticker(snapshot) as ticker:
            assert other.do("fire 3") == 0
            expected = fire([ticker])
    assert delivered(recorder) == expected


def test_overlays_of_subvolumes(daemon: Daemon, subvolumes: tuple[Path, Path], tmp_path: Path) -> None:
    """Some see the same inode as those without an overlay, and some that of the other subvolume."""
    image, snapshot = subvolumes
    with ExitStack() as stack:
        merged = [stack.enter_context(overlay(folder, tmp_path / folder.name)) for folder in subvolumes]
        tickers = [stack.enter_context(Ticker(folder / "bin" / "ticker")) for folder in (image, snapshot, *merged)]
        with Recorder(daemon.target, SELECTOR) as recorder:
            assert len(recorder.armed()) == 2
            expected: Counter[int] = fire(tickers)
        assert delivered(recorder) == expected


def test_containers_of_a_snapshot(daemon: Daemon, subvolumes: tuple[Path, Path], tmp_path: Path) -> None:
    with ExitStack() as stack:
        tickers = [stack.enter_context(container(folder, storage=tmp_path)) for folder in subvolumes * 2]
        with Recorder(daemon.target, SELECTOR) as recorder:
            assert len(recorder.armed()) == 2
            expected = fire(tickers)
        assert delivered(recorder) == expected
