"""Scopes mean processes, not numbers: what becomes of a subscription when its processes end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stapsdtd.client import Client, EndReason, InvalidRequestError, SubscribeOptions
from tests.support import TICKER, Daemon, Recorder, Ticker, compile_target, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def reborn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a program under a pid that another one had."""
    return compile_target("reborn.c", tmp_path_factory.mktemp("targets") / "reborn")


def tick(program: Path) -> str:
    return f"{TICKER}:{program}::tick(arg0)"


def test_another_process_with_the_pid_is_not_traced(
    daemon: Daemon, engine: str, ticker_program: Path, reborn: Path
) -> None:
    with Ticker(ticker_program) as gone, Ticker(ticker_program) as other:
        pids = [gone.pid, other.pid]
        with Recorder(daemon.target, tick(ticker_program), pids=pids) as recorder, Client(daemon.target) as client:
            gone.do("fire 2")
            gone.kill()
            # the control thread has noticed by the second answer
            client.list_probes()
            client.list_probes()
            with Ticker(reborn, str(gone.pid), ticker_program) as another:
                # the ftrace engine arms files, not processes
                assert another.do("fire 3") == (engine == "ftrace")
            other.do("fire 1")
            wait_for(lambda: len(recorder.events) == 3, "all events")
        account = recorder.finish()
    assert [event.pid for event in recorder.events] == [gone.pid, gone.pid, other.pid]
    assert (account.delivered, account.filtered) == (3, 3 if engine == "ftrace" else 0)


def test_stream_ends_with_its_process_after_all_that_it_fired(
    daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    with Recorder(daemon.target, tick(ticker_program), pids=[ticker.pid], kernel_buffer_kib=16384) as recorder:
        ticker.do("fire 100000")
        ticker.kill()
        wait_for(lambda: recorder.end_reason, "the stream to end")
        account = recorder.finish()
    assert recorder.end_reason is EndReason.PROCESSES_ENDED
    assert [value for (value,) in recorder.values()] == list(range(100_000))
    assert (account.fired, account.delivered) == (100_000, 100_000)


def test_process_that_is_gone_is_an_error(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    ticker.kill()
    with (
        Client(daemon.target) as client,
        pytest.raises(InvalidRequestError, match=f"there is no process {ticker.pid}"),
    ):
        client.subscribe(tick(ticker_program), SubscribeOptions(pids=[ticker.pid]))


def test_command_ends_with_its_process(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    command = stapsdt_command(daemon.target, "trace", tick(ticker_program), "--pid", str(ticker.pid))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trace:
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        ticker.do("fire 2")
        ticker.kill()
        out, err = trace.communicate(timeout=60)
    assert trace.returncode == 0
    assert len(out.splitlines()) == 2
    assert err.splitlines()[-1].endswith("1 site; every process of --pid has ended")
