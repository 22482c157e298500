from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from stapsdtd.procs import threads as threads_module
from stapsdtd.procs.threads import Threads
from tests.unit.memory import allocated_bytes

SECOND = 1_000_000_000


class Host:
    """/proc and the clock, as far as threads are concerned."""

    def __init__(self) -> None:
        self.living: dict[int, int] = {}
        self.now = 0

    def threads(self) -> Threads:
        return Threads(tgid=self.living.get, clock_ns=lambda: self.now)

    def followed(self) -> Threads:
        threads = self.threads()
        threads.follow(lambda: None)
        return threads


@pytest.fixture
def host() -> Host:
    return Host()


def pids(threads: Threads, *tids: int) -> list[int]:
    found: list[int] = threads.pids_of(np.array(tids, np.int32)).tolist()
    return found


def test_own_threads() -> None:
    release, started, ids = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        ids.append(threading.get_native_id())
        started.set()
        release.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait(20)
    assert pids(Threads(), ids[0], os.getpid(), ids[0]) == [os.getpid()] * 3
    release.set()
    thread.join()


def test_thread_that_ended_is_remembered_for_some_seconds(host: Host) -> None:
    threads = host.followed()
    threads.forked(11, 10)
    threads.exited(11, 10)
    host.now = 9 * SECOND
    threads.exited(12, 10)
    assert pids(threads, 11, 12, 11) == [10, 10, 10]
    host.now = 11 * SECOND
    threads.exited(13, 10)
    # nobody knows 11 any more
    assert pids(threads, 11, 12) == [11, 10]


def test_what_was_found_in_proc_is_remembered_while_forks_are_told(host: Host) -> None:
    host.living[11] = 10
    threads, forgetful = host.followed(), host.threads()
    assert pids(threads, 11) == pids(forgetful, 11) == [10]
    del host.living[11]
    assert pids(threads, 11) == [10]
    assert pids(forgetful, 11) == [11]


def test_number_that_comes_back_as_a_process(host: Host) -> None:
    threads = host.followed()
    threads.forked(11, 10)
    threads.forked(11, 11)
    host.living[11] = 11
    assert pids(threads, 11) == [11]
    threads.forked(11, 12)
    assert pids(threads, 11) == [12]


def test_thread_nobody_was_told_of_yet_makes_it_catch_up(host: Host) -> None:
    threads = host.threads()
    threads.follow(lambda: threads.exited(11, 10))
    assert pids(threads, 11) == [10]


def test_missed_happenings_make_living_threads_be_found_anew(host: Host) -> None:
    threads = host.followed()
    threads.forked(11, 10)
    threads.forked(12, 10)
    threads.exited(12, 10)
    # unseen, 11 ended and its number is a thread of another process now
    host.living[11] = 20
    assert pids(threads, 11) == [10]
    threads.missed()
    assert pids(threads, 11, 12) == [20, 10]


def test_nothing_is_kept_after_the_end(host: Host) -> None:
    threads = host.followed()
    threads.forked(11, 10)
    threads.exited(12, 10)
    threads.unfollow()
    host.living[13] = 10
    assert pids(threads, 11, 12, 13) == [11, 12, 10]
    # nor is what was found in /proc
    del host.living[13]
    assert pids(threads, 13) == [13]


def test_memory_is_bounded_by_the_living_and_the_lately_ended(host: Host) -> None:
    threads = host.followed()
    tids = range(10_000, 15_000)

    def live() -> None:
        for tid in tids:
            host.now += SECOND
            threads.forked(tid, 10)
            threads.exited(tid, 10)

    # all of them would take some 800 kB
    assert allocated_bytes(live) < 10_000
    assert pids(threads, *tids).count(10) <= 11


def test_memory_is_bounded_by_a_number_where_threads_end_without_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads_module, "_MOST_KEPT", 10)
    threads = host.followed()
    for tid in range(10_000, 15_000):
        threads.forked(tid, 10)
        threads.exited(tid, 10)
    assert pids(threads, *range(10_000, 15_000)).count(10) == 10


def test_number_that_comes_back_and_ends_again_is_remembered_from_then_on(host: Host) -> None:
    threads = host.followed()
    threads.exited(11, 10)
    host.now = 6 * SECOND
    threads.forked(11, 20)
    threads.exited(11, 20)
    host.now = 12 * SECOND
    threads.exited(12, 10)
    assert pids(threads, 11) == [20]
