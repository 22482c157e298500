"""Which processes are followed, by the kernel's reports of forks and ends."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest

from stapsdtd.errors import KernelFeatureError
from stapsdtd.procs.descendants import Descendants, FollowedProcesses

SECOND = 1_000_000_000


class Host:
    """The clock, and what the connector has that is not read yet."""

    def __init__(self) -> None:
        self.now = 0
        self.unread: list[tuple[int, int, int]] = []
        self.descendants = Descendants(clock_ns=lambda: self.now)
        self.descendants.connect(self.catch_up)

    def catch_up(self) -> None:
        unread, self.unread = self.unread, []
        for fork in unread:
            self.descendants.forked(*fork)


@pytest.fixture
def host() -> Host:
    return Host()


def among(followed: FollowedProcesses, *pids: int) -> list[int]:
    found = np.array(pids, np.int32)
    followed_pids: list[int] = found[followed.among(found)].tolist()
    return followed_pids


def test_children_and_their_children(host: Host) -> None:
    followed = host.descendants.follow([10])
    host.descendants.forked(11, 11, 10)
    host.descendants.forked(12, 12, 11)
    host.descendants.forked(20, 20, 9)
    # a thread of a process that is not followed
    host.descendants.forked(21, 20, 10)
    assert followed.remaining() == {10, 11, 12}
    assert among(followed, 9, 10, 12, 20, 21) == [10, 12]


def test_one_that_was_forked_before_is_adopted_unless_it_has_ended(host: Host) -> None:
    followed = host.descendants.follow([10])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        followed.adopt(child.pid)
        assert followed.remaining() == {10, child.pid}
        host.descendants.exited(child.pid, child.pid)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        # nobody has waited for it, so that its number is not another's yet
        followed.adopt(child.pid)
    assert followed.remaining() == {10}


def test_what_the_kernel_has_reported_is_known(host: Host) -> None:
    """An event can be there before the report of its process was read."""
    followed = host.descendants.follow([10])
    host.unread = [(11, 11, 10)]
    assert among(followed, 11) == [11]
    host.unread = [(12, 12, 11)]
    assert followed.remaining() == {10, 11, 12}


def test_process_is_remembered_while_its_events_may_be_in_a_buffer(host: Host) -> None:
    followed = host.descendants.follow([10])
    host.descendants.forked(11, 11, 10)
    host.descendants.exited(11, 11)
    # the end of a thread is not that of its process
    host.descendants.exited(99, 10)
    assert followed.remaining() == {10}
    assert among(followed, 11) == [11]
    host.now += 11 * SECOND
    host.descendants.exited(10, 10)
    assert followed.remaining() == frozenset()
    assert among(followed, 10, 11) == [10]


def test_pid_that_another_process_gets_is_not_followed(host: Host) -> None:
    followed = host.descendants.follow([10])
    host.descendants.forked(11, 11, 10)
    host.descendants.exited(11, 11)
    host.descendants.forked(11, 11, 1)
    assert among(followed, 11) == []
    host.descendants.forked(11, 11, 10)
    assert followed.remaining() == {10, 11}


def test_each_scope_has_its_own(host: Host) -> None:
    first, second = host.descendants.follow([10]), host.descendants.follow([20])
    host.descendants.forked(21, 21, 20)
    first.close()
    host.descendants.forked(11, 11, 10)
    assert first.remaining() == {10}
    assert second.remaining() == {20, 21}


def test_children_are_found_though_their_forks_went_unreported(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    followed = host.descendants.follow([os.getpid(), 2**22 + 1])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        host.descendants.missed()
        assert {os.getpid(), child.pid} <= followed.remaining()
    # one of them was no process any more
    assert 2**22 + 1 not in followed.remaining()
    assert "some processes may not be followed" in caplog.text


def test_nothing_is_followed_without_reports(host: Host) -> None:
    host.descendants.disconnect()
    with pytest.raises(KernelFeatureError, match="the process connector is unavailable"):
        host.descendants.follow([10])
