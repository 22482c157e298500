"""A process that floods the daemon, with events or with files, costs itself what it asks for, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.support import TICKER, Recorder, Ticker, running_daemon, wait_for
from tests.unit.test_elf_hostile import many_notes

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

SOMEBODY = 61_234
"""A user id that nobody has."""

MAPPER = """
import mmap, os, sys
held = []
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
print("ready", flush=True)
sys.stdin.read()
"""

FEW = 60
MANY = 3_000_000


@pytest.mark.parametrize(("kernel_buffer_kib", "queue_bytes"), [(64, 0), (16384, 1 << 20)], ids=["kernel", "queue"])
def test_few_events_of_one_process_all_arrive_beside_a_flood(
    tmp_path: Path, ticker_program: Path, kernel_buffer_kib: int, queue_bytes: int
) -> None:
    with (
        running_daemon(tmp_path, "--engine", "bpf") as daemon,
        Ticker(ticker_program) as flooding,
        Ticker(ticker_program) as quiet,
        Recorder(
            daemon.target,
            f"{TICKER}:{ticker_program}::tick",
            pids=[flooding.pid, quiet.pid],
            kernel_buffer_kib=kernel_buffer_kib,
            queue_bytes=queue_bytes,
        ) as recorder,
    ):
        flooding.begin(f"fire {MANY}")
        wait_for(lambda: recorder.losses, "the flood to be more than can be had")
        for _ in range(FEW):
            seen = len(recorder.events)
            quiet.do("fire 1")
            wait_for(lambda seen=seen: len(recorder.events) > seen, "events")  # type: ignore[misc]
        flooding.finish()
    account = recorder.account
    assert account is not None
    assert sum(event.pid == quiet.pid for event in recorder.events) == FEW
    assert account.lost_kernel_buffer + account.lost_queue == account.lost > 0
    assert account.delivered + account.lost == account.fired == MANY + FEW


@contextmanager
def mapping(paths: Sequence[Path]) -> Iterator[int]:
    """A process of an ordinary user's that maps files of its own; answer its pid."""
    for path in paths:
        os.chown(path, SOMEBODY, SOMEBODY)
    command = ["setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups", sys.executable, "-c", MAPPER]
    with subprocess.Popen([*command, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users get to, which pytest's are not."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_file_that_takes_long_to_parse_keeps_nobody_waiting(folder: Path, ticker_program: Path) -> None:
    # each has a deadline of its own; one after the other they take longer than a single file may
    files = [folder / f"large{number}" for number in range(3)]
    content = many_notes(150_000).build()
    for file in files:
        file.write_bytes(content)
    with running_daemon(folder) as daemon, Client(daemon.target) as client, mapping(files):
        before = client.info().probes
        with (
            Ticker(ticker_program) as ticker,
            Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick", pids=[ticker.pid]) as recorder,
        ):
            ticker.do("fire 3")
            wait_for(lambda: len(recorder.events) == 3, "the events")
            assert client.info().probes < before + 300, "a large file was to be parsed still"
            wait_for(lambda: client.info().probes >= before + 300, "the large files to be parsed")


@pytest.mark.timeout(300)
def test_a_thousand_files_keep_nobody_waiting(folder: Path, ticker_program: Path) -> None:
    content = ticker_program.read_bytes()
    files = [folder / f"file{number}" for number in range(1000)]
    for file in files:
        file.write_bytes(content)
    with running_daemon(folder) as daemon, Client(daemon.target) as client, mapping(files):
        with (
            Ticker(ticker_program) as ticker,
            Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick", pids=[ticker.pid]) as recorder,
        ):
            ticker.do("fire 3")
            wait_for(lambda: len(recorder.events) == 3, "the events")
            assert client.info().objects < len(files), "the files were to be looked at still"
        wait_for(lambda: client.info().objects > len(files), "all files to be known", 200)
