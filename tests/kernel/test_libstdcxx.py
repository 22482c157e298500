from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest

from stapsdtd.client import Client
from tests.support import TARGETS, Daemon, Recorder, compile_once, notes_in, require

pytestmark = pytest.mark.kernel

Step = tuple[str, int, int]
"""Which probe, the object's address, and its type's; an address is 0 where the program does not know it."""


class Thrower:
    """A running tests/targets/throw.cpp."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def do(self, command: str) -> list[Step]:
        """Answer what it did."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        steps = []
        while (line := self._read()) != ".":
            name, thrown, type_info = line.split()
            steps.append((name, int(thrown), int(type_info)))
        return steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(shutil.which("g++"), "g++")
    return compile_once(TARGETS / "throw.cpp", tmp_path_factory.mktemp("targets") / "throw", ["g++", "-O2"])


@pytest.fixture
def thrower(program: Path) -> Iterator[Thrower]:
    with Thrower(program) as running:
        yield running


def test_three_probes_are_listed(daemon: Daemon, thrower: Thrower) -> None:
    with Client(daemon.target) as client:
        listing = client.list_probes(["libstdcxx:*"], pids=[thrower.pid], details=True)
    assert {probe.name for probe in listing} == {"catch", "rethrow", "throw"}
    (path,) = {probe.path for probe in listing}
    # other tests' programs have some
    assert [problem for problem in listing.problems if problem.path == path] == []
    assert sum(len(probe.sites) for probe in listing) == notes_in(path)


@pytest.mark.vm
def test_throw_catch_and_rethrow_are_told_in_order(daemon: Daemon, thrower: Thrower) -> None:
    with Recorder(daemon.target, "libstdcxx:*", pids=[thrower.pid]) as recorder:
        steps = [*thrower.do("throw 200"), *thrower.do("nested 30"), *thrower.do("library")]
    told = [(event.probe.name, *event.values) for event in recorder.events]
    assert [(name, type_info) for name, _, type_info in told] == [(name, type_info) for name, _, type_info in steps]
    assert [name for name, *_ in told].count("rethrow") == 30
    # the program sees the object only when it catches it
    assert [step for step in told if step[0] != "throw"] == [step for step in steps if step[0] != "throw"]
    for (name, thrown, _), (following, caught, _) in pairwise(told):
        if name == "throw":
            assert (following, caught) == ("catch", thrown)
    assert recorder.finish().lost == 0


def test_program_that_starts_later_is_traced_from_its_first_throw(
    daemon: Daemon, program: Path, thrower: Thrower
) -> None:
    # the library's file is armed, so the kernel arms a later program before that runs; this process, which the recorder
    # excludes, maps the library too
    with Recorder(daemon.target, "libstdcxx:throw(arg1)") as recorder:
        thrower.do("throw 1")
        with Thrower(program) as later:
            steps = later.do("throw 100")
    types = [event.values[0] for event in recorder.events if event.pid == later.pid]
    assert types == [type_info for name, _, type_info in steps if name == "throw"]
