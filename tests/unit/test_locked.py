"""Calls that may wait for a process's lock, and who else waits then."""

from __future__ import annotations

import os
import threading

import pytest

from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel.locked import LockedCalls
from tests.support import wait_for

PID = os.getpid()


def test_result_and_error_come_back() -> None:
    calls = LockedCalls()
    assert calls.call(PID, lambda: 5) == 5
    with pytest.raises(OSError, match="nothing"):
        calls.call(PID, _fail)
    assert calls.call(PID, lambda: 6) == 6


def _fail() -> int:
    raise OSError("nothing")


def test_process_that_holds_its_lock_costs_itself() -> None:
    calls = LockedCalls(most_seconds=1)
    told: list[set[int]] = []
    discarded: list[str] = []
    calls.on_free = told.append
    lock = threading.Event()

    def wait() -> str:
        lock.wait()
        return "late"

    with pytest.raises(ObjectPendingError):
        calls.call(PID, wait, discarded.append)
    # it is not tried again while it holds it
    with pytest.raises(ObjectPendingError):
        calls.call(PID, _fail)
    assert calls.call(os.getppid(), lambda: "other") == "other"
    lock.set()
    wait_for(lambda: told, "the process to be told of")
    assert (told, discarded) == ([{PID}], ["late"])
    assert calls.call(PID, lambda: "now") == "now"


def test_user_holds_few_threads() -> None:
    calls = LockedCalls(most_seconds=0.001)
    lock = threading.Event()
    before = threading.active_count()
    for pid in range(2**22 + 1, 2**22 + 20):
        with pytest.raises(ObjectPendingError):
            calls.call(pid, lock.wait)
    assert threading.active_count() - before <= 4
    told: list[set[int]] = []
    calls.on_free = told.append
    lock.set()
    wait_for(lambda: len(set().union(*told)) == 19, "all of them to be told of")


def test_late_result_may_be_kept_for_the_next_look() -> None:
    calls = LockedCalls(most_seconds=0.05)
    told: list[set[int]] = []
    calls.on_free = told.append
    may_end = threading.Event()

    def slow() -> str:
        may_end.wait()
        return "of this look"

    with pytest.raises(ObjectPendingError):
        calls.call(PID, slow, kept_as="maps")
    may_end.set()
    wait_for(lambda: told, "the process to be told of")
    assert calls.call(PID, lambda: "other", kept_as="other") == "other"
    assert calls.call(PID, lambda: "anew", kept_as="maps") == "of this look"
    assert calls.call(PID, lambda: "anew", kept_as="maps") == "anew"


def test_only_some_late_results_are_kept() -> None:
    calls = LockedCalls(most_seconds=0.001)
    told: list[set[int]] = []
    calls.on_free = told.append
    for pid in range(2**22 + 1, 2**22 + 101):
        lock = threading.Event()
        with pytest.raises(ObjectPendingError):
            calls.call(pid, lock.wait, kept_as="maps")
        lock.set()
        wait_for(lambda: told, "it to end")
        told.clear()
    assert len(calls._kept) <= 32
