"""What is told of processes, whose command lines are as long and as slow as they like."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from stapsdtd.kernel.identity import Identities
from stapsdtd.kernel.locked import LockedCalls
from tests.support import wait_for


@contextmanager
def running(*command: str) -> Iterator[int]:
    """A program that is there."""
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            wait_for(lambda: os.readlink(f"/proc/{child.pid}/exe") != os.readlink("/proc/self/exe"), "the program")
            yield child.pid
        finally:
            child.kill()


def test_command_line() -> None:
    with running("sleep", "1000") as pid:
        found = Identities(LockedCalls()).of(pid)
    assert found is not None
    assert (found.comm, found.command_line) == ("sleep", ("sleep", "1000"))


def test_process_that_is_gone() -> None:
    assert Identities(LockedCalls()).of(1 << 30) is None


def test_command_line_without_an_end_is_told_in_part() -> None:
    with running("sh", "-c", "read line; exit", *["x" * 1000] * 100) as pid:
        found = Identities(LockedCalls()).of(pid)
    assert found is not None
    assert found.command_line[:4] == ("sh", "-c", "read line; exit", "x" * 1000)
    assert sum(len(argument) + 1 for argument in found.command_line) <= 4097


def test_command_lines_that_take_long_take_so_long_together() -> None:
    now = itertools.count(step=0.3)
    identities = Identities(LockedCalls(), lambda: next(now))
    told = [identities.of(os.getpid()) for _ in range(10)]
    assert [bool(each and each.command_line) for each in told] == [True] * 4 + [False] * 6
    assert all(each and each.comm for each in told)
