"""Processes of a scope: real ones, whose end is reported, and whose pids others may get."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from stapsdtd.errors import InvalidArgumentError, LimitReachedError
from stapsdtd.sessions.scoped_processes import ProcessExits, ScopedProcesses
from tests.support import descriptors
from tests.unit.samples import batch

PATIENCE_SECONDS = 20


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield started
    for child in started:
        child.kill()
        child.wait()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_SECONDS))


class Exits:
    """Which pids were reported, in order."""

    def __init__(self) -> None:
        self.pids: asyncio.Queue[int] = asyncio.Queue()

    def __call__(self, pid: int) -> None:
        self.pids.put_nowait(pid)


def test_end_of_a_process_is_reported_to_each_scope_that_names_it(children: list[subprocess.Popen[bytes]]) -> None:
    first, second = (child.pid for child in children)

    async def work() -> None:
        exits = ProcessExits()
        before = descriptors(os.getpid())
        both, one, other = Exits(), Exits(), Exits()
        stop_both = exits.follow([first, second], both)
        stop_one = exits.follow([first], one)
        stop_other = exits.follow([first], other)
        assert descriptors(os.getpid()) == before + 2
        stop_other()
        children[0].kill()
        assert await both.pids.get() == await one.pids.get() == first
        assert descriptors(os.getpid()) == before + 1
        # what has been reported may be unfollowed, too
        stop_both()
        stop_one()
        assert descriptors(os.getpid()) == before
        assert other.pids.empty()

    run(work())


def test_pid_whose_process_is_gone_is_looked_up_anew(children: list[subprocess.Popen[bytes]]) -> None:
    """The end may not have been reported yet when another scope names the pid."""
    pid = children[0].pid

    async def work() -> None:
        exits = ProcessExits()
        earlier = Exits()
        stop = exits.follow([pid], earlier)
        children[0].kill()
        children[0].wait()
        with pytest.raises(InvalidArgumentError, match=f"there is no process {pid}"):
            exits.follow([pid], Exits())
        assert earlier.pids.get_nowait() == pid
        stop()

    run(work())


def test_thread_is_no_process() -> None:
    tids: list[int] = []
    began, release = threading.Event(), threading.Event()

    def wait() -> None:
        tids.append(threading.get_native_id())
        began.set()
        release.wait(PATIENCE_SECONDS)

    async def work() -> None:
        with pytest.raises(InvalidArgumentError, match=f"{tids[0]} is a thread of process {os.getpid()}"):
            ProcessExits().follow(tids, Exits())

    thread = threading.Thread(target=wait)
    thread.start()
    assert began.wait(PATIENCE_SECONDS)
    try:
        run(work())
    finally:
        release.set()
        thread.join()


def test_refusal_leaves_nothing_followed(children: list[subprocess.Popen[bytes]]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()

    async def work() -> None:
        exits = ProcessExits()
        before = descriptors(os.getpid())
        with pytest.raises(InvalidArgumentError) as raised:
            exits.follow([children[0].pid, gone.pid], Exits())
        assert raised.value.field == "scope.pids"
        assert descriptors(os.getpid()) == before

    run(work())


def test_descriptors_run_out(children: list[subprocess.Popen[bytes]]) -> None:
    async def work() -> None:
        exits = ProcessExits()
        with ExitStack() as stack:
            with suppress(OSError):
                while True:
                    stack.callback(os.close, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            with pytest.raises(LimitReachedError, match="no descriptors left"):
                exits.follow([children[0].pid], Exits())
        exits.follow([children[0].pid], Exits())()

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(os.getpid()) + 20, limits[1]))
    try:
        run(work())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_scope_that_fails_keeps_no_other_from_learning_of_an_exit(children: list[subprocess.Popen[bytes]]) -> None:
    def fail(pid: int) -> None:
        raise RuntimeError(pid)

    async def work() -> None:
        exits = ProcessExits()
        other = Exits()
        exits.follow([children[0].pid], fail)
        exits.follow([children[0].pid], other)
        children[0].kill()
        assert await other.pids.get() == children[0].pid

    run(work())


def test_followed_processes_take_a_part_of_the_descriptors(children: list[subprocess.Popen[bytes]]) -> None:
    first, second = (child.pid for child in children)

    async def work() -> None:
        exits = ProcessExits(max_processes=1)
        stop = exits.follow([first], Exits())
        with pytest.raises(LimitReachedError, match="follows 1 processes, which is its limit"):
            exits.follow([second], Exits())
        # one that is followed costs nothing more
        exits.follow([first], Exits())()
        stop()
        exits.follow([second], Exits())()

    run(work())


def test_later_events_of_the_pid_of_one_that_ended_are_anothers() -> None:
    now = 100
    processes = ScopedProcesses([7, 8], clock_ns=lambda: now)
    events = batch([90, 110, 110, 120], pid=[7, 7, 8, 9])
    assert processes.rest(events) is events
    processes.ended(7)
    assert processes.remaining == {8}
    assert processes.rest(events).pid.tolist() == [7, 8, 9]
    now = 115
    processes.ended(8)
    assert processes.remaining == frozenset()
    assert processes.rest(events).time_ns.tolist() == [90, 110, 120]


def test_many_ended_processes_are_told_apart() -> None:
    processes = ScopedProcesses(range(5000), clock_ns=iter(range(100, 6000)).__next__)
    # in no order of their pids
    for pid in reversed(range(1, 5000)):
        processes.ended(pid)
    assert processes.remaining == {0}
    first_ns, last_ns = 100 + 4999 - 4000, 100 + 4999 - 1
    events = batch([first_ns, first_ns + 1, last_ns, last_ns + 1, 9999], pid=[4000, 4000, 1, 1, 0])
    assert processes.rest(events).time_ns.tolist() == [first_ns, last_ns, 9999]
