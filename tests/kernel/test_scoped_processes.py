"""Scopes mean processes, not numbers: what becomes of a subscription when its processes end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stapsdtd.client import Client, EndReason, InvalidRequestError, SubscribeOptions
from tests.support import TICKER, Daemon, Recorder, Ticker, compile_target, is_dead, stapsdt_command, wait_for

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
                # it has noticed what that executes, and the arming thread has done what it does then
                client.list_probes()
                client.list_probes()
                with Recorder(daemon.target, f"{TICKER}:{ticker_program}::values", pids=[other.pid]):
                    pass
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


def test_process_outlives_its_main_thread(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, library: Path, tmp_path: Path
) -> None:
    """Perf has events of threads, and those of the main one end with it."""
    late = Path(shutil.copy(library, tmp_path / "late.so"))
    selectors = [tick(ticker_program), f"library:{late}::called(arg0)"]
    with Recorder(daemon.target, *selectors, pids=[ticker.pid]) as recorder:
        ticker.begin("leave")
        wait_for(lambda: is_dead(ticker.pid), "the main thread to end")

        def is_traced() -> bool:
            ticker.do("fire 1")
            return len(recorder.events) > 0

        wait_for(is_traced, "an event of another thread")
        ticker.do("fire 1000")
        ticker.do(f"open {late}")
        wait_for(lambda: any(each.path == str(late) for each in recorder.armed()), "the library to be armed")
        ticker.do("call 3")
        wait_for(lambda: [each.probe.name for each in recorder.events[-3:]] == ["called"] * 3, "the library's events")
        ticker.kill()
        wait_for(lambda: recorder.end_reason, "the stream to end")
        account = recorder.finish()
    ticks = [event.values for event in recorder.events if event.probe.name == "tick"]
    assert ticks[-1000:] == [(number,) for number in range(1000)]
    assert account.fired == account.delivered == len(recorder.events)


def test_another_thread_executes_a_program(daemon: Daemon, ticker_program: Path) -> None:
    """It becomes the main one."""
    exec_in_a_thread = (
        "import os, sys, threading; threading.Thread(target=os.execv, args=(sys.argv[1], sys.argv[1:])).start(); "
        "threading.Event().wait()"
    )
    held = "import sys; input(); exec(sys.argv.pop(1))"
    with subprocess.Popen(
        [sys.executable, "-c", held, exec_in_a_thread, ticker_program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with Recorder(daemon.target, tick(ticker_program), pids=[process.pid]) as recorder:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ready\n"

            def is_traced() -> bool:
                assert process.stdin is not None
                process.stdin.write(b"fire 1\n")
                process.stdin.flush()
                return len(recorder.events) > 0

            wait_for(is_traced, "an event of the program")
            process.kill()
        assert {event.pid for event in recorder.events} == {process.pid}


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
