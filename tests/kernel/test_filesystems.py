"""Files whose file systems may never reply: they cost who maps them, and nobody else waits."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState
from tests.support import (
    TARGETS,
    Daemon,
    Recorder,
    Ticker,
    compile_target,
    require,
    running_daemon,
    wait_for,
)

pytestmark = pytest.mark.kernel

_KIND = "fuse.slowfiles"
_SOMEBODY = 61_235
"""A user id that nobody has."""
_MAPPER = ("/usr/bin/python3", str(TARGETS / "mapper.py"))


class SlowFiles:
    """A mounted tests/targets/slow_files.c."""

    def __init__(self, folder: Path, program: Path, source: Path) -> None:
        self._point = folder / "slow"
        self._control = folder / "control"
        self._point.mkdir()
        self.path = self._point / "file"
        options = "allow_other,subtype=slowfiles,attr_timeout=0,entry_timeout=0"
        self._server = subprocess.Popen(
            [program, source, self._control, "-f", "-o", options, self._point], stderr=subprocess.DEVNULL
        )
        wait_for(lambda: f" {self._point} ".encode() in Path("/proc/self/mountinfo").read_bytes(), "the mount")

    def hang(self, *operations: str) -> None:
        self._control.write_text(" ".join(operations))

    def forget(self) -> None:
        """What the kernel has of the file, and nobody maps in."""
        with open(self.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """What still waits for the server fails."""
        subprocess.run(["umount", "-l", str(self._point)], check=True)
        self._server.kill()
        self._server.wait()


@pytest.fixture(scope="session")
def slow_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(os.path.exists("/dev/fuse"), "/dev/fuse")
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False)
    require(not found.returncode, "libfuse3-dev")
    return compile_target("slow_files.c", tmp_path_factory.mktemp("slow") / "slow_files", *found.stdout.split())


@pytest.fixture
def slow(tmp_path: Path, slow_program: Path, ticker_program: Path) -> Iterator[SlowFiles]:
    files = SlowFiles(tmp_path, slow_program, ticker_program)
    try:
        yield files
    finally:
        # first, since whoever is to end may wait for it
        files.hang()
        files.close()


def seconds_of(work: object) -> float:
    begin = time.monotonic()
    assert callable(work)
    work()
    return time.monotonic() - begin


def start_a_program() -> None:
    subprocess.run(["/bin/true"], check=True)


def test_files_of_fuse_are_listed_and_refused(daemon: Daemon, slow: SlowFiles) -> None:
    with Ticker(slow.path) as ticker, Client(daemon.target) as client:
        selector = f"ticker:{slow.path}::tick"
        (probe,) = wait_for(lambda: client.list_probes([selector]), "the probe to be listed")
        assert ticker.pid in probe.pids
        with Recorder(daemon.target, selector) as recorder:
            (site,) = recorder.sites
            assert site.state is SiteState.REFUSED
            assert _KIND in site.reason
            assert f'[filesystems] arm = ["{_KIND}"]' in site.reason
            assert ticker.do("fire 1") == 0
        assert not recorder.events
    assert recorder.account is not None
    assert recorder.account.fired == 0


def test_files_of_fuse_are_armed_where_the_configuration_says_so(tmp_path: Path, engine: str, slow: SlowFiles) -> None:
    config = tmp_path / "stapsdtd.toml"
    config.write_text(f'[filesystems]\narm = ["{_KIND}"]\n')
    with (
        running_daemon(tmp_path, "--engine", engine, "--config", str(config)) as daemon,
        Ticker(slow.path) as ticker,
        Recorder(daemon.target, f"ticker:{slow.path}::tick") as recorder,
    ):
        wait_for(recorder.armed, "the site to be armed")
        ticker.do("fire 10")
        wait_for(lambda: len(recorder.events) == 10, "the events")
