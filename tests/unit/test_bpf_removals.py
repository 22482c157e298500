"""Events go one after the other in a thread of their own, and their caller is told in its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from stapsdtd.capture.bpf.removals import Removals
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.probe_events import ProbeEvent

PATIENCE_SECONDS = 20


class Event:
    """Takes as long to remove as a test likes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go = threading.Event()
        self.thread: threading.Thread | None = None
        self._error = error

    def remove(self) -> None:
        assert self.may_go.wait(PATIENCE_SECONDS)
        self.thread = threading.current_thread()
        if self._error is not None:
            raise self._error


@pytest.fixture
def removals() -> Iterator[Removals]:
    made = Removals()
    yield made
    made.finish()


def begin(removals: Removals, event: Event, gone: list[tuple[Event, threading.Thread]]) -> None:
    removals.begin(cast("ProbeEvent", event), lambda: gone.append((event, threading.current_thread())))


def test_what_is_awaited_comes_first(removals: Removals) -> None:
    first, *passing, awaited = (Event() for _ in range(5))
    gone: list[tuple[Event, threading.Thread]] = []
    begin(removals, first, gone)
    for event in passing:
        removals.begin(cast("ProbeEvent", event), lambda: None, is_awaited=False)
    begin(removals, awaited, gone)
    settled = removals.settled()
    assert removals.waiting >= len(passing)
    first.may_go.set()
    awaited.may_go.set()
    settled.result(PATIENCE_SECONDS)
    removals.collect()
    assert [event for event, _ in gone] == [first, awaited]
    for event in passing:
        event.may_go.set()


def test_caller_does_not_wait_and_is_told_in_its_own_thread(removals: Removals) -> None:
    event, gone = Event(), list[tuple[Event, threading.Thread]]()
    begin(removals, event, gone)
    settled = removals.settled()
    removals.collect()
    assert not settled.done()
    assert gone == []
    event.may_go.set()
    settled.result(PATIENCE_SECONDS)
    assert gone == []
    removals.collect()
    removals.collect()
    assert gone == [(event, threading.current_thread())]
    assert event.thread is not threading.current_thread()


def test_settled_is_of_what_was_begun_before_and_may_be_given_up(removals: Removals) -> None:
    first, second, gone = Event(), Event(), list[tuple[Event, threading.Thread]]()
    begin(removals, first, gone)
    settled = removals.settled()
    begin(removals, second, gone)
    assert removals.settled().cancel()
    first.may_go.set()
    settled.result(PATIENCE_SECONDS)
    assert second.thread is None
    second.may_go.set()
    removals.finish()
    assert [event for event, _ in gone] == [first, second]


@pytest.mark.parametrize("error", [TracefsRejectedError("uprobe_events", "-:g/e", errno.EBUSY, "busy"), KeyError("x")])
def test_event_that_cannot_be_removed_holds_up_no_other(
    removals: Removals, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    events, gone = [Event(error), Event()], list[tuple[Event, threading.Thread]]()
    for event in events:
        event.may_go.set()
        begin(removals, event, gone)
    removals.finish()
    assert [event for event, _ in gone] == events
    assert len(caplog.records) == 1
