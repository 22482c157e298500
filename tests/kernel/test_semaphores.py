"""A site is refused, with the reason, where the kernel could not count in its semaphore and take that back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest

from stapsdtd.client import Client, SiteState, SiteStatus
from tests.semaphores import mapped_bytes
from tests.support import COMMANDS, TARGETS, Daemon, Recorder, compile_once, require, wait_for

pytestmark = pytest.mark.kernel

ARMED = ["data", "first", "third"]
REFUSED = {
    "bss": "its semaphore is in .bss, which the loader clears",
    "beyond": "in memory not backed by the file",
    "relro": "its semaphore is in data that the loader makes read-only (RELRO)",
    "second": "semaphores:first, whose note is at the same nop, has another semaphore",
    "fourth": "semaphores:first, whose note is at the same nop, has another semaphore",
}
NOP = b"\x90"


class Program:
    """A running tests/targets/semaphores.c."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def fire(self) -> list[int]:
        """Return the semaphores: in data, of the second note, in .bss, beyond the file, in RELRO."""
        return [int(each) for each in self._ask("fire").split()]

    def execute_itself(self) -> None:
        assert self._ask("again") == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    require(shutil.which("gcc"), "gcc")
    return compile_once(TARGETS / "semaphores.c", tmp_path / "semaphores", ["gcc", "-O2", "-no-pie"])


def kernel_log(path: Path, daemon: Daemon) -> list[str]:
    """Return what the kernel says of uprobes of a file, or of a daemon's that it could not remove."""
    told = subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout.splitlines()
    marks = (f"inode: {path.stat().st_ino:#x} ", f":{daemon.process.pid} failed to unregister")
    return [line for line in told if any(mark in line for mark in marks)]


def names(statuses: Sequence[SiteStatus], state: SiteState) -> list[str]:
    return sorted(status.name for status in statuses if status.state is state)


@pytest.mark.parametrize("is_for_one", [False, True], ids=["all", "one"])
def test_what_cannot_be_counted_is_refused(daemon: Daemon, path: Path, is_for_one: bool) -> None:
    with Program(path) as running:
        files, pids = ([], [running.pid]) if is_for_one else ([str(path)], [])
        with Recorder(daemon.target, "semaphores:*", files=files, pids=pids) as recorder:
            wait_for(lambda: len(recorder.armed()) == len(ARMED), "what can be armed to be armed")
            assert names(recorder.statuses, SiteState.ARMED) == ARMED
            assert names(recorder.statuses, SiteState.REFUSED) == sorted(REFUSED)
            for status in recorder.statuses:
                assert REFUSED.get(status.name, "") in status.reason
            assert running.fire() == [2, 0, 0, 0, 0]
            running.execute_itself()
            wait_for(lambda: running.fire() == [2, 0, 0, 0, 0], "the new program to be armed")
        assert sorted({event.probe.name for event in recorder.events}) == ARMED
        assert running.fire() == [0, 0, 0, 0, 0]
        with Client(daemon.target) as client:
            sites = [site for probe in client.list_probes(files=[str(path)]) for site in probe.sites]
        for site in sites:
            assert mapped_bytes(running.pid, str(path), site.offset, 1, "x") == NOP
    assert kernel_log(path, daemon) == []


def test_who_lists_is_told(daemon: Daemon, path: Path) -> None:
    with Client(daemon.target) as client:
        probes = {probe.name: probe.sites for probe in client.list_probes(files=[str(path)])}
    assert sorted(probes) == sorted([*ARMED, *REFUSED])
    for name, (site,) in probes.items():
        assert bool(site.refused) == (name in REFUSED)
        assert REFUSED.get(name, "") in site.refused


@pytest.mark.parametrize("name", REFUSED)
def test_who_asks_for_nothing_else_is_told(daemon: Daemon, path: Path, name: str) -> None:
    command = [str(COMMANDS / "stapsdt"), "trace", f"semaphores:{name}", "--", str(path)]
    environment = os.environ | {"STAPSDT_SERVER": daemon.target}
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    told = ran.stderr
    assert any("refused: " in line and REFUSED[name] in line for line in told.splitlines()), told
    assert "every site that matches was refused" in told
