"""D programs over programs and libraries as they are linked and loaded, and over probes that programs ask about."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client
from stapsdtd.elf import parse_object
from tests.kernel.recovery import NOP
from tests.support import (
    TICKER,
    Daemon,
    Ticker,
    compile_target,
    mapped_bytes,
    stapsdt,
    stapsdt_command,
    wait_for,
)

pytestmark = pytest.mark.kernel


@contextmanager
def tracing(daemon: Daemon, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*stapsdt_command(daemon.target, "d"), "-q", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process


def ended(process: subprocess.Popen[str]) -> str:
    """End it, and return what it printed."""
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    return output


def byte_at(pid: int, path: Path, offset: int) -> bytes:
    return mapped_bytes(pid, str(path), offset, 1, "x")


@pytest.mark.parametrize("link", ["-pie", "-no-pie", "-static"])
def test_programs_however_they_are_linked(daemon: Daemon, tmp_path: Path, link: str) -> None:
    compile_as = ("-fPIE",) if link == "-pie" else ("-fno-pie",)
    program = compile_target("arguments.c", tmp_path / "linked", "-DPROVIDER=linked", *compile_as, link)
    clause = 'linked$target:::twelve { printf("%d %d %s\\n", args[0], args[11], probefunc); }'
    done = stapsdt(daemon.target, "d", "-q", "-n", clause, "-c", str(program))
    assert done.stdout.split() == ["1200", "1211", "fire"]


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    ("clause", "expected"),
    [("{ @ = count(); }", ["3"]), ('{ printf("%d\\n", arg0); }', ["0", "1", "2"])],
    ids=["added up", "interpreted"],
)
def test_a_library_of_a_command(
    daemon: Daemon, ticker: Ticker, tmp_path: Path, clause: str, expected: list[str], *, is_shared: bool
) -> None:
    """It is armed before the command maps it, and it is the command's, whoever else has it."""
    library = compile_target("library.c", tmp_path / "liblinked.so", "-shared", "-fPIC")
    program = compile_target("linked.c", tmp_path / "program", str(library), f"-Wl,-rpath,{tmp_path}")
    if is_shared:
        ticker.do(f"open {library}")
        with Client(daemon.target) as client:
            wait_for(lambda: client.list_probes("library:called", pids=[ticker.pid]), "the other's library")
    done = stapsdt(daemon.target, "d", "-q", "-n", f"library$target:::called {clause}", "-c", str(program))
    assert done.stdout.split() == expected


def test_a_library_that_is_loaded_later(daemon: Daemon, ticker: Ticker, tmp_path: Path) -> None:
    library = compile_target("library.c", tmp_path / "late.so", "-shared", "-fPIC")
    clause = f'library{ticker.pid}:late.so::called {{ printf("%s %s %d\\n", probeprov, probemod, arg0); }}'
    with tracing(daemon, "-Z", "-n", clause, "-n", 'BEGIN { printf("ready\\n"); }') as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        ticker.do(f"open {library}")
        with open(library, "rb") as file:
            (site,) = parse_object(file).sites
        wait_for(lambda: byte_at(ticker.pid, library, site.site_offset) != NOP, "the library to be armed")
        ticker.do("call 2")
        lines = ended(process).split("\n")
    assert [line for line in lines if line] == [f"library{ticker.pid} late.so {number}" for number in range(2)]


def test_a_program_that_asks_whether_a_probe_is_enabled(daemon: Daemon, ticker: Ticker) -> None:
    assert ticker.do("fire 1") == 0
    program = f'BEGIN {{ printf("ready\\n"); }} {TICKER}$target:::tick {{ @ = count(); }}'
    with tracing(daemon, "-n", program, "-p", str(ticker.pid)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert ticker.do("fire 3") == 1
        assert ended(process).split() == ["3"]
    # on a busy host it may have ended as "still disarming"
    wait_for(lambda: not ticker.semaphore, "the probe to be disabled")
    assert ticker.do("fire 1") == 0
