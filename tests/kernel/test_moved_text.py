"""Programs that execute copies of their text are told of, since no probe fires there; others are not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.support import TIME_FACTOR, Daemon, Ticker, compile_target, stapsdt, stapsdt_command

pytestmark = pytest.mark.kernel

PROVIDER = f"p{os.getpid()}moved"
HIT = f"{PROVIDER}:hit"
WHERE = "from anonymous memory, where uprobes cannot be placed"
BUILDS = {
    "pie": "",
    "fixed": "-no-pie -fno-pie",
    "static": "-static",
    "few segments": "-Wl,-z,noseparate-code",
}


@pytest.fixture(params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return compile_target("moved.c", tmp_path / "moved", f"-DPROVIDER={PROVIDER}", *BUILDS[request.param].split())


@pytest.fixture
def plain_program(tmp_path: Path) -> Path:
    return compile_target("moved.c", tmp_path / "moved", f"-DPROVIDER={PROVIDER}")


@pytest.fixture
def running(plain_program: Path) -> Iterator[Ticker]:
    with Ticker(plain_program) as started:
        yield started


def listed(daemon: Daemon) -> dict[str, list[str]]:
    """Return in what memory each probe's text is, where it was moved."""
    lines = stapsdt(daemon.target, "list", f"{PROVIDER}:*", "--json").stdout.splitlines()
    return {
        probe["name"]: [each["memory"] for each in probe.get("moved", [])]
        for probe in (json.loads(line) for line in lines)
    }


def test_moved_page_and_text(daemon: Daemon, program: Path) -> None:
    with Ticker(program) as running:
        assert listed(daemon) == {"hit": [], "never": [], "other": []}
        running.do("page")
        assert listed(daemon) == {"hit": ["anonymous memory"], "never": [], "other": []}
    with Ticker(program) as running:
        assert listed(daemon) == {"hit": [], "never": [], "other": []}
        running.do("text")
        # a mapping that is reported has the daemon look at the process again
        running.do("jit")
        everything = {"hit": ["anonymous memory"], "never": ["anonymous memory"], "other": ["anonymous memory"]}
        assert listed(daemon) == everything


def test_memory_of_another_file(daemon: Daemon, running: Ticker) -> None:
    running.do("shared")
    assert listed(daemon) == {"hit": ["/memfd:text"], "never": [], "other": []}


@pytest.mark.parametrize("command", ["jit", "unmap", "drop"])
def test_no_false_alarm(daemon: Daemon, running: Ticker, command: str) -> None:
    running.do(command)
    assert listed(daemon) == {"hit": [], "never": [], "other": []}
    assert "uprobes" not in stapsdt(daemon.target, "list", f"{PROVIDER}:*").stderr


def test_list_says_which_process(daemon: Daemon, running: Ticker, plain_program: Path) -> None:
    running.do("page")
    said = stapsdt(daemon.target, "list", f"{PROVIDER}:*").stderr
    assert f"no hits of 1 site in PID {running.pid} (moved): it runs its text of {plain_program} {WHERE}" in said
    with Client(daemon.target) as client:
        (moved,) = client.moved_text(f"{PROVIDER}:*")
        assert (moved.pid, moved.comm, moved.sites, moved.uid) == (running.pid, "moved", 1, os.getuid())
        assert not client.moved_text(f"{PROVIDER}:other")
        assert not client.moved_text(HIT, pids=[os.getpid()])


@pytest.mark.parametrize("command", ["trace", "count"])
def test_said_at_the_beginning_and_at_the_end(daemon: Daemon, running: Ticker, command: str) -> None:
    running.do("page")
    said = stapsdt(daemon.target, command, HIT, "--duration", "0.2").stderr
    assert said.count(f"PID {running.pid} (moved)") == 2, said
    told = stapsdt(daemon.target, command, HIT, "--duration", "0.2", "--json").stderr.splitlines()
    begin, end = (record["moved"] for record in map(json.loads, told) if "moved" in record)
    assert [each["pid"] for each in begin] == [each["pid"] for each in end] == [running.pid]
    of_another = stapsdt(daemon.target, command, HIT, "--execname", "another", "--duration", "0.2").stderr
    assert "(moved)" not in of_another


def test_said_while_tracing(daemon: Daemon, running: Ticker) -> None:
    command = stapsdt_command(daemon.target, "trace", HIT, "--duration", str(4 * TIME_FACTOR))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as trace:
        assert trace.stderr is not None
        assert "1 site armed" in trace.stderr.readline()
        running.do("page")
        assert f"PID {running.pid} (moved)" in trace.stderr.readline()


def test_command_that_copied_breakpoints(daemon: Daemon, plain_program: Path) -> None:
    """The kernel kills it, whoever set them."""
    command = stapsdt_command(daemon.target, "count", HIT, "--", str(plain_program))
    done = subprocess.run(command, input="page\nfire 1\n", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 128 + signal.SIGTRAP
    assert "moved was killed by SIGTRAP: programs that copy their text" in done.stderr
