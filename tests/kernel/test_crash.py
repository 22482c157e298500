from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import EndReason
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import COMMANDS, TICKER, Daemon, Recorder, Ticker, running_daemon, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel


def clean_up() -> subprocess.CompletedProcess[str]:
    command = [str(COMMANDS / "stapsdtd"), "--cleanup"]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.fixture
def foreign(tracefs: Tracefs, ticker_program: Path) -> Iterator[None]:
    """Another tool's event and instance."""
    group = f"another_{os.getpid()}"
    tracefs.append_definition(f"p:{group}/event {ticker_program}:0x1100")
    tracefs.make_instance(group)
    yield
    assert tracefs.events(group) == ["event"]
    assert group in tracefs.instances()
    tracefs.remove_instance(group)
    tracefs.append_definition(f"-:{group}/event")


@pytest.fixture
def killed(own_daemon: Daemon, engine: str, ticker: Ticker) -> Daemon:
    """A daemon that was killed while it held the ticker's probes."""
    client = subprocess.Popen(
        stapsdt_command(own_daemon.target, "trace", f"{TICKER}:*", "--pid", str(ticker.pid), "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: ticker.semaphore == 1, "the probes to be armed")
    own_daemon.kill()
    client.kill()
    client.communicate()
    if engine == "ftrace":
        assert ticker.semaphore == 1
    else:
        # what bpf arms goes with the descriptors that held it
        wait_for(lambda: ticker.semaphore == 0, "the kernel to disarm")
    return own_daemon


@pytest.mark.alone
@pytest.mark.usefixtures("foreign")
def test_start_removes_what_a_killed_daemon_left(killed: Daemon, ticker: Ticker) -> None:
    killed.restart()
    assert ticker.semaphore == 0
    with Recorder(killed.target, f"{TICKER}:tick(arg0)") as recorder:
        assert ticker.do("fire 2") == 1
    assert recorder.values() == [(0,), (1,)]
    assert ticker.semaphore == 0


@pytest.mark.alone
@pytest.mark.usefixtures("foreign")
def test_cleanup_removes_it_too_and_is_idle_the_second_time(killed: Daemon, engine: str, ticker: Ticker) -> None:
    left = "removed 3 events and 1 instances\n" if engine == "ftrace" else "removed 1 events and 0 instances\n"
    assert clean_up().stdout == left
    assert ticker.semaphore == 0
    assert clean_up().stdout == "removed 0 events and 0 instances\n"
    killed.restart()


@pytest.mark.alone
def test_cleanup_leaves_a_living_daemon_alone(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:tick(arg0)") as recorder:
        clean_up()
        assert ticker.do("fire 2") == 1
    assert recorder.values() == [(0,), (1,)]


def test_sigterm_disarms_tells_the_streams_and_exits_0(tmp_path: Path, engine: str, ticker: Ticker) -> None:
    with (
        running_daemon(tmp_path, "--engine", engine) as daemon,
        Recorder(daemon.target, f"{TICKER}:tick(arg0)") as recorder,
    ):
        ticker.do("fire 2")
        assert daemon.stop() == 0
        assert ticker.semaphore == 0
        recorder.finish()
        assert recorder.end_reason is EndReason.SERVER_STOPPING
    assert recorder.values() == [(0,), (1,)]


def test_second_daemon_on_the_same_socket_is_refused_in_one_line(daemon: Daemon) -> None:
    second = subprocess.run(
        [str(COMMANDS / "stapsdtd"), "--listen", daemon.target, "--log-level", "error"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert "another stapsdtd serves it" in second.stderr


def test_client_that_dies_leaves_nothing_after_its_lease(daemon: Daemon, ticker: Ticker) -> None:
    client = subprocess.Popen(stapsdt_command(daemon.target, "trace", f"{TICKER}:tick"), stderr=subprocess.DEVNULL)
    wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
    client.send_signal(signal.SIGKILL)
    client.wait()
    wait_for(lambda: ticker.semaphore == 0, "the lease to run out", seconds=60)


def test_ready_is_told_to_the_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket  # noqa: PLC0415

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with running_daemon(tmp_path):
            assert manager.recv(1000).splitlines()[0] == b"READY=1"
        assert manager.recv(100) == b"STOPPING=1"
