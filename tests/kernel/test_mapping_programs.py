"""Records of mappings by a BPF program, where the kernel gives the daemon no perf events."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client
from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel.mapping_programs import FENTRY, MULTI, MappingPrograms
from stapsdtd.kernel.perf import Lost, Mapped
from tests.refusing import refusing
from tests.support import TIME_FACTOR, Daemon, Ticker, running_daemon, wait_for

pytestmark = [pytest.mark.kernel, pytest.mark.vm]


@pytest.fixture(params=[FENTRY, MULTI])
def programs(request: pytest.FixtureRequest) -> Iterator[MappingPrograms]:
    try:
        opened = MappingPrograms((request.param,))
    except KernelFeatureError as error:
        # this project's usual host refuses both; the kernels of tests/vm have them
        pytest.skip(str(error))
    assert opened.way == request.param
    yield opened
    opened.close()


def mapped_by(programs: MappingPrograms, pid: int, name: str) -> list[Mapped]:
    found: list[Mapped] = []

    def is_there() -> bool:
        records = list(programs.read())
        found.extend(each for each in records if isinstance(each, Mapped) and each.pid == pid)
        return any(name in each.path for each in found)

    wait_for(is_there, f"a mapping of {name}")
    return found


def test_records_are_those_of_maps(programs: MappingPrograms, ticker_program: Path) -> None:
    with Ticker(ticker_program) as ticker:
        found = mapped_by(programs, ticker.pid, str(ticker_program))
        maps = Path(f"/proc/{ticker.pid}/maps").read_text().splitlines()
    (record,) = [each for each in found if each.path == str(ticker_program)]
    (line,) = [line.split() for line in maps if "x" in line.split()[1] and line.endswith(str(ticker_program))]
    start, end = (int(each, 16) for each in line[0].split("-"))
    assert (record.start, record.start + record.length, record.file_offset) == (start, end, int(line[2], 16))
    status = ticker_program.stat()
    assert (record.dev, record.inode) == (status.st_dev, status.st_ino)
    assert any("libc" in each.path for each in found)
    # neither data nor anonymous memory
    assert len(found) == len({each.path for each in found if each.path})


def test_paths_lead_through_mounts(programs: MappingPrograms, ticker_program: Path, tmp_path: Path) -> None:
    inside = tmp_path / "with space" / "inside"
    inside.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", inside], check=True)
    try:
        program = Path(shutil.copy(ticker_program, inside / "hidden"))
        with Ticker(program) as ticker:
            (record,) = [
                each for each in mapped_by(programs, ticker.pid, "hidden") if each.inode == program.stat().st_ino
            ]
        assert record.path == str(program)
    finally:
        # a daemon of another test may be reading it
        subprocess.run(["umount", "--lazy", inside], check=True)


def test_memfd_has_no_path(programs: MappingPrograms, ticker_program: Path) -> None:
    memfd = os.memfd_create("ticking")
    try:
        os.write(memfd, ticker_program.read_bytes())
        with Ticker(f"/proc/{os.getpid()}/fd/{memfd}") as ticker:
            found = mapped_by(programs, ticker.pid, "libc")
        assert [each.path for each in found if each.inode == os.fstat(memfd).st_ino] == [""]
    finally:
        os.close(memfd)


def test_what_finds_no_room_is_told_as_lost(programs: MappingPrograms) -> None:
    map_often = "import mmap, sys\nfor _ in range(20000): mmap.mmap(sys.stdin.fileno(), 4096, prot=5).close()"
    with open("/bin/true", "rb") as file:
        subprocess.run([sys.executable, "-c", map_often], stdin=file, check=True)
    assert any(isinstance(each, Lost) for each in programs.read())
    # and only once
    assert not any(isinstance(each, Lost) for each in programs.read())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("mappings"), prefix=refusing("perf_event_open")) as daemon:
        yield daemon


@pytest.mark.usefixtures("programs")
def test_library_is_found_when_it_is_mapped(daemon: Daemon, ticker: Ticker, library: Path, tmp_path: Path) -> None:
    with Client(daemon.target) as client:
        (feature,) = [each for each in client.info().features if each.name == "mapping records"]
        assert feature.available
        assert "a BPF program reports executable mappings, by fentry" in feature.detail
        late = Path(shutil.copy(library, tmp_path / "late.so"))
        ticker.do(f"open {late}")
        wait_for(lambda: client.list_probes([f"library:{late}::*"]).probes, "the library to be listed", 5 * TIME_FACTOR)
    assert "/proc is read every" not in daemon.log()
