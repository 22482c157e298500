"""A kprobe's event shares a program with others, which tells what it was not run for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel import own_programs
from stapsdtd.kernel.function_events import FunctionEvent
from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.places import FunctionPlace
from stapsdtd.kernel.tracefs import Tracefs


class Host(Tracefs):
    """Takes definitions, unless it refuses them."""

    def __init__(self) -> None:
        super().__init__("/nonexistent")
        self.refuses = False

    def append_definition(self, definition: str, name: str = "") -> None:
        if self.refuses:
            raise TracefsRejectedError(name, definition, 22, "as told")

    def read(self, relative: str) -> str:
        assert relative.endswith("/id")
        return "7"


@pytest.fixture
def program() -> Iterator[OwnProgram]:
    made = OwnProgram(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    yield made
    made.release()
    assert made.take_skipped() == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.descriptor)


def event(program: OwnProgram, host: Host, name: str = "g/one") -> FunctionEvent:
    return FunctionEvent(host, program, name, [FunctionPlace("", "vfs_read", is_return=False)], 1)


def test_what_was_skipped_is_told_once(program: OwnProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the program that events share, each of which tells of itself alone."""
    host = Host()
    events = [event(program, host, name) for name in ("g/one", "g/two")]
    profile = {"one": 10, "two": 20}
    told = []
    for skipped in (0, 3, 3, 5):
        monkeypatch.setattr(own_programs, "recursion_misses", lambda _, count=skipped: count)
        told.append(program.take_skipped())
    assert told == [0, 3, 0, 2]
    assert [each.missed(lambda: profile) for each in events] == [10, 20]
    assert all(each.own_program is program for each in events)
    for each in events:
        each.remove()
        # the reaper may try again
        each.remove()


def test_a_refused_event_lets_go_of_the_program(program: OwnProgram) -> None:
    host = Host()
    host.refuses = True
    with pytest.raises(TracefsRejectedError):
        event(program, host)


def test_an_event_whose_definition_stays_keeps_it(program: OwnProgram) -> None:
    host = Host()
    made = event(program, host)
    host.refuses = True
    with pytest.raises(TracefsRejectedError):
        made.remove()
    os.fstat(program.descriptor)
    host.refuses = False
    made.remove()
