"""A stripped program's static variables, whose addresses stand in a separate debug file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client
from stapsdtd.client import Unavailable as UnavailableArgument
from stapsdtd.elf import parse_object
from stapsdtd.kernel.debug_files import ROOT, debug_file
from stapsdtd.model import Argument, Memory, Unavailable
from tests.support import Daemon, Recorder, Ticker, compile_once

pytestmark = pytest.mark.kernel

SOURCE = r"""
#include <sys/sdt.h>
#include <stdio.h>

static long secret = 41;
static int table[8] = {0, 1, 2, 3};

__attribute__((noinline)) static void fire(void)
{
    STAP_PROBE2(stripped, fired, secret, table[3]);
    secret++;
    table[3]++;
}

int main(void)
{
    char line[16];

    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        fire();
        puts("fired 0");
        fflush(stdout);
    }
    return 0;
}
"""


class Stripped:
    """A program that was stripped, and the file with what was taken from it."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "stripped"
        self.debug_file = folder / "stripped.debug"
        (folder / "stripped.c").write_text(SOURCE)
        compile_once(folder / "stripped.c", self.program, ["gcc", "-O2", "-g", "-Wl,--build-id"])
        for command in (
            ["objcopy", "--only-keep-debug", self.program, self.debug_file],
            ["strip", self.program],
        ):
            subprocess.run(list(map(str, command)), check=True)
        with open(self.program, "rb") as file:
            parsed = parse_object(file)
        assert parsed.lacks_symbols
        assert parsed.build_id is not None
        self.build_id = parsed.build_id

    def arguments(self, debug_file: Path) -> tuple[Argument, ...]:
        with open(self.program, "rb") as file, open(debug_file, "rb") as debug:
            return parse_object(file, debug).sites[0].arguments


@pytest.fixture
def stripped(tmp_path: Path) -> Stripped:
    return Stripped(tmp_path)


@pytest.fixture
def installed(stripped: Stripped) -> Iterator[Path]:
    """Where a package of debug files puts it."""
    path = Path(ROOT, ".build-id", stripped.build_id[:2], f"{stripped.build_id[2:]}.debug")
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(stripped.debug_file.read_bytes())
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        for folder in made:
            folder.rmdir()


@pytest.mark.usefixtures("installed")
def test_values_of_static_variables(daemon: Daemon, stripped: Stripped) -> None:
    with Ticker(stripped.program) as program, Recorder(daemon.target, "stripped:fired", pids=[program.pid]) as recorder:
        program.do("fire")
        program.do("fire")
    assert recorder.values() == [(41, 3), (42, 4)]


def test_without_the_file_the_reason_is_told(daemon: Daemon, stripped: Stripped) -> None:
    with Ticker(stripped.program), Client(daemon.target) as client:
        (probe,) = client.list_probes(["stripped:fired"])
    assert [argument.operand for argument in probe.sites[0].arguments] == [
        UnavailableArgument("no symbol table of the object contains secret"),
        UnavailableArgument("no symbol table of the object contains table"),
    ]


def test_file_that_others_may_not_read_is_not_told_of(stripped: Stripped, installed: Path) -> None:
    with debug_file(stripped.build_id) as found:
        assert found is not None
        assert os.path.samestat(os.fstat(found), os.stat(installed))
    installed.chmod(0o640)
    with debug_file(stripped.build_id) as found:
        assert found is None


def test_what_is_no_file_holds_nobody_up(stripped: Stripped, installed: Path) -> None:
    installed.unlink()
    os.mkfifo(installed)
    with debug_file(stripped.build_id) as found:
        assert found is None


def test_file_of_another_build_is_of_no_use(stripped: Stripped, tmp_path: Path) -> None:
    assert [type(argument.operand) for argument in stripped.arguments(stripped.debug_file)] == [Memory, Memory]
    (tmp_path / "other").mkdir()
    other = Stripped(tmp_path / "other")
    subprocess.run(
        ["objcopy", "--only-keep-debug", "--remove-section=.note.gnu.build-id", stripped.debug_file, other.debug_file],
        check=True,
    )
    for debug in (other.debug_file, tmp_path / "stripped.c", stripped.program):
        assert {type(argument.operand) for argument in stripped.arguments(debug)} == {Unavailable}


def test_addresses_of_a_prelinked_program_are_not_those_of_its_debug_file(stripped: Stripped, tmp_path: Path) -> None:
    moved = tmp_path / "moved.debug"
    subprocess.run(["objcopy", "--change-addresses=0x10000", stripped.debug_file, moved], check=True)
    assert {type(argument.operand) for argument in stripped.arguments(moved)} == {Unavailable}
