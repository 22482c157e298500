"""What ordinary users ask for is answered by a daemon with the rights that its unit leaves it, which cannot kill."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stapsdtd.client import Client, RequestFailedError
from stapsdtd.procs import opening
from tests.support import (
    ROOT,
    TICKER,
    Daemon,
    Ticker,
    children,
    injected,
    is_dead,
    running_daemon,
    stapsdt_command,
    wait_for,
)
from tests.units import capabilities, with_capabilities
from tests.users import ANNE, public_folder

pytestmark = pytest.mark.kernel

_HITS = 500
TICK = f"{TICKER}:tick"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with (
        public_folder() as folder,
        running_daemon(folder, "--engine", "bpf", prefix=with_capabilities(capabilities())) as started,
    ):
        os.chmod(started.target.removeprefix("unix:"), 0o666)
        yield started


@pytest.fixture
def program(ticker_program: Path) -> Iterator[Path]:
    with public_folder() as folder:
        yield Path(shutil.copy(ticker_program, folder / "own"))


def as_anne(daemon: Daemon, *arguments: Path | str) -> str:
    command = ANNE.command(*stapsdt_command(daemon.target, *map(str, arguments)))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_command(daemon: Daemon, program: Path) -> None:
    said = as_anne(daemon, "trace", TICK, "--json", "--", program, str(_HITS))
    events = [json.loads(line) for line in said.splitlines()]
    assert [event["args"][0] for event in events] == list(range(_HITS))
    assert {event["path"] for event in events} == {str(program)}


def test_own_file(daemon: Daemon, program: Path) -> None:
    command = ANNE.command(
        *stapsdt_command(daemon.target, "trace", TICK, "--json", "--file", str(program), "--count", str(_HITS))
    )
    with (
        Client(daemon.target) as client,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracing,
    ):
        try:
            wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the trace to stream")
            subprocess.run(ANNE.command(program, str(_HITS)), check=True, stdout=subprocess.DEVNULL)
            said, errors = tracing.communicate(timeout=60)
        finally:
            tracing.kill()
    assert len(said.splitlines()) == _HITS, errors
    assert json.loads(errors.splitlines()[-1])["sites"] == 1


def test_own_d_program(daemon: Daemon, program: Path) -> None:
    text = f'{TICKER}$target:::tick {{ @n = count(); }} END {{ printa("n=%@d\\n", @n); }}'
    said = as_anne(daemon, "d", "-q", "-n", text, "-c", f"{program} {_HITS}")
    assert said.split() == [f"n={_HITS}"]


def test_refused_file(daemon: Daemon, program: Path) -> None:
    program.chmod(0o700)
    with (
        ANNE.connecting(daemon.target) as target,
        Client(target) as client,
        pytest.raises(RequestFailedError, match=f"^{program}: not readable by you$"),
    ):
        client.list_probes(files=[str(program)])


_WITHOUT_PERF_EVENTS = """
import ctypes, errno, os, platform, struct, sys
number = {"x86_64": 298, "aarch64": 241}[platform.machine()]
LOAD_NUMBER, IS, ANSWER = 0x20, 0x15, 0x06
lines = [(LOAD_NUMBER, 0, 0, 0), (IS, 0, 1, number), (ANSWER, 0, 0, 0x50000 | errno.EACCES), (ANSWER, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
assert ctypes.CDLL(None).prctl(22, 2, program) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""As kernel.perf_event_paranoid = 3 of Debian's kernels does."""


def test_refusals_of_the_kernel_leave_no_traceback(program: Path) -> None:
    """running_daemon looks for them in the log, and for errors."""
    prefix = [sys.executable, "-c", _WITHOUT_PERF_EVENTS, *with_capabilities(capabilities())]
    with (
        public_folder() as folder,
        running_daemon(folder, "--engine", "bpf", prefix=prefix) as limited,
        Ticker(*ANNE.command(program)) as ticker,
    ):
        os.chmod(limited.target.removeprefix("unix:"), 0o666)
        for scope in (["--pid", str(ticker.pid)], ["--file", str(program)], ["--", str(program), "5"]):
            command = stapsdt_command(limited.target, "count", TICK, "--json", "--duration", "1", *scope)
            done = subprocess.run(ANNE.command(*command), capture_output=True, text=True, check=False, timeout=60)
            assert "the host refused" not in done.stderr + done.stdout
            assert "internal error" not in done.stderr + done.stdout


def refusal(daemon: Daemon, program: Path) -> str:
    with (
        ANNE.connecting(daemon.target) as target,
        Client(target) as client,
        pytest.raises(RequestFailedError) as raised,
    ):
        client.list_probes(files=[str(program)])
    return str(raised.value)


@pytest.mark.parametrize("name", ["setuid", "setgid"])
def test_right_that_is_lacking_is_told_with_its_remedy(program: Path, name: str) -> None:
    others = [each for each in capabilities() if each != name]
    with public_folder() as folder, running_daemon(folder, prefix=with_capabilities(others)) as limited:
        assert refusal(limited, program) == (
            f"{program}: the server lacks CAP_SETUID and CAP_SETGID, and so cannot open files as you; add them to "
            "CapabilityBoundingSet with 'systemctl edit stapsdtd', or to its container with --cap-add"
        )


def test_thread_that_cannot_be_started_is_told_with_its_remedy(program: Path) -> None:
    with public_folder() as folder, running_daemon(folder) as limited:
        with injected(limited.pid, "clone,clone3", "error=EAGAIN"):
            assert (
                "start a thread: Resource temporarily unavailable; the daemon has too many tasks: raise TasksMax with "
                "'systemctl edit stapsdtd', elsewhere 'ulimit -u'"
            ) in refusal(limited, program)
        with ANNE.connecting(limited.target) as target, Client(target) as client:
            assert client.list_probes(files=[str(program)])


_HOLDING = """
import importlib.util, os, socket, sys, time
spec = importlib.util.spec_from_file_location("opening", sys.argv[1])
opening = importlib.util.module_from_spec(spec)
spec.loader.exec_module(opening)

def name(path, root, sender):
    sender.send(b"+")
    {held_up}

opening._name = name
descriptor, root, user, *groups = sys.argv[2:]
opening.main(socket.socket(fileno=int(descriptor)), root, int(user), list(map(int, groups)))
"""
"""Becomes the user as any opening process does, and is then held up as by a file system."""

_OPENING = """
import asyncio, contextlib, os, sys
from stapsdtd.errors import FileRefusedError
from stapsdtd.procs.file_opener import FileOpener
from stapsdtd.procs.named_files import Credentials
from stapsdtd.procs.opened_files import Bounds

uid, seconds, *command = sys.argv[1:]
opener = FileOpener(None, bounds=Bounds(reply_seconds=float(seconds)), command=command)
with contextlib.suppress(FileRefusedError):
    asyncio.run(opener.open(["/far"], Credentials("anne", int(uid), frozenset({int(uid)}), os.getpid())))
print(len(opener._late), flush=True)
"""
"""Opens a file as the daemon does, and tells how many processes have not ended."""


@contextmanager
def opening_for_anne(held_up: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    holding = (sys.executable, "-I", "-S", "-c", _HOLDING.format(held_up=held_up), opening.__file__)
    arguments: Sequence[str] = (str(ANNE.uid), str(seconds), *holding)
    command = [*with_capabilities(capabilities()), sys.executable, "-c", _OPENING, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def openers_of(pid: int) -> list[int]:
    """Return the processes that open files for another one, and have become their user by now."""
    found = []
    for child in children(pid):
        with suppress(FileNotFoundError):
            lines = Path(f"/proc/{child}/status").read_text().splitlines()
            if "\t".join(["Uid:", *[str(ANNE.uid)] * 4]) in lines:
                found.append(child)
    return found


@pytest.mark.parametrize(
    "held_up",
    ["time.sleep(1000)", "os.kill(os.getpid(), 19)", "[None for _ in iter(int, 1)]"],
    ids=["waits", "is stopped", "runs"],
)
def test_process_that_is_held_up_is_ended(held_up: str) -> None:
    with opening_for_anne(held_up, 2) as daemon:
        (opener,) = wait_for(lambda: openers_of(daemon.pid), "the process that opens files")
        assert daemon.communicate(timeout=60)[0].split() == ["0"]
    assert is_dead(opener)


def test_process_ends_with_the_daemon() -> None:
    with opening_for_anne("time.sleep(1000)", 1000) as daemon:
        (opener,) = wait_for(lambda: openers_of(daemon.pid), "the process that opens files")
        daemon.kill()
    wait_for(lambda: is_dead(opener), "it to end")
