"""The process connector tells of forks, execs and exits, and of nothing else, some at a time."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator

import pytest

from stapsdtd.kernel import connector
from stapsdtd.kernel.connector import Executed, Exited, Forked, Overflowed, ProcessConnector, ProcessEvent
from tests.support import wait_for

pytestmark = pytest.mark.kernel

_RENAMES = 50_000


@pytest.fixture
def listening() -> Iterator[ProcessConnector]:
    made = ProcessConnector()
    yield made
    made.close()


def until_exit(listening: ProcessConnector, pid: int) -> list[ProcessEvent]:
    """Return what is told until a process has exited."""
    events: list[ProcessEvent] = []

    def has_exited() -> bool:
        events.extend(listening.read())
        return Exited(pid, pid) in events

    wait_for(has_exited, "the exit")
    return events


def test_a_process_from_fork_to_exit(listening: ProcessConnector) -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        events = [each for each in until_exit(listening, process.pid) if process.pid in each]
    assert events == [
        Forked(process.pid, process.pid, os.getpid()),
        Executed(process.pid),
        Exited(process.pid, process.pid),
    ]


def test_renaming_without_end_is_not_told(listening: ProcessConnector) -> None:
    """It filled the queue, so that forks were lost."""
    program = f"for number in range({_RENAMES}): name.seek(0); name.write(b'n%d' % number)"
    with subprocess.Popen(["python3", "-c", f"name = open('/proc/self/comm', 'wb', 0)\n{program}"]) as process:
        events = until_exit(listening, process.pid)
    assert Overflowed() not in events
    assert Executed(process.pid) in events


def test_reading_ends_while_events_come(listening: ProcessConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "MOST_AT_ONCE", 10)
    with subprocess.Popen(["/bin/sh", "-c", "for i in $(seq 20); do /bin/true; done"]) as process:
        process.wait()
        sizes = []
        while select.select([listening], [], [], 0)[0]:
            sizes.append(len(list(listening.read())))
    assert sum(sizes) >= 60
    assert max(sizes) <= 10
