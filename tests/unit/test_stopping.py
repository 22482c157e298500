"""A stop that does not end says what holds it, lets go of what the next daemon needs, and ends the process."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

import pytest

from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.runtime.stopping import StopDeadline, describe_threads
from tests.support import wait_for

PATIENCE_SECONDS = 20


def test_in_time_and_in_order(caplog: pytest.LogCaptureFixture) -> None:
    done = SimpleQueue[str]()
    StopDeadline(lambda: done.put("let go"), lambda code: done.put(f"leave {code}"), 0.05, 0.2).begin()
    assert [done.get(timeout=PATIENCE_SECONDS) for _ in range(2)] == ["let go", "leave 1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "stopping takes more than 0.05 s: " in caplog.text
    assert "MainThread" in caplog.text
    assert "run 'stapsdtd --cleanup' once the process is gone to remove what is left" in caplog.text


def test_process_ends_though_nothing_can_be_let_go(caplog: pytest.LogCaptureFixture) -> None:
    done = SimpleQueue[int]()

    def fail() -> None:
        raise OSError("no")

    StopDeadline(fail, done.put, 0.05, 0.2).begin()
    assert done.get(timeout=PATIENCE_SECONDS) == 1
    assert "cannot free the sockets for the next daemon" in caplog.text


def test_thread_is_named_with_what_it_does_and_where() -> None:
    read, write = os.pipe()
    thread = threading.Thread(target=os.read, args=(read, 1), name="stapsdtd-waits", daemon=True)
    thread.start()

    def told() -> str:
        return next(
            (each for each in describe_threads() if each.startswith("stapsdtd-waits") and "state S" in each), ""
        )

    line = wait_for(told, "the thread to wait")
    os.write(write, b"x")
    thread.join()
    os.close(read)
    os.close(write)
    # read(2) has this number on x86-64; elsewhere it has one too
    assert line.rpartition(" ")[2].isdecimal()
    assert not any(each.startswith("stapsdtd-waits") for each in describe_threads())


def test_code_is_named_by_its_path_in_the_package() -> None:
    LockedCalls().call(os.getpid(), lambda: None)
    begin = "stapsdtd-maps in _serve (kernel/locked.py:"
    wait_for(lambda: any(line.startswith(begin) for line in describe_threads()), "the worker to wait for calls")
