"""Events go one after the other in a thread of their own, and their caller is told in its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from stapsdtd.capture.bpf.reaper import EventReaper
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.uprobe_links import UprobeLink
from tests.support import wait_for

PATIENCE_SECONDS = 20


class Event:
    """Takes as long to remove as a test likes."""

    holds_event_mutex = True

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go = threading.Event()
        self.is_patched = True
        self.thread: threading.Thread | None = None
        self._error = error

    def unpatch(self) -> None:
        self.is_patched = False

    def disarm(self) -> None:
        self.unpatch()

    def remove(self) -> None:
        assert self.may_go.wait(PATIENCE_SECONDS)
        self.thread = threading.current_thread()
        if self._error is not None:
            raise self._error


class Link:
    """Takes as long to close as all others that are to be closed at the same time."""

    holds_event_mutex = False

    def __init__(self, together: threading.Barrier) -> None:
        self._together = together

    def unpatch(self) -> None:
        self._together.wait(PATIENCE_SECONDS)

    disarm = unpatch

    def remove(self) -> None:
        pass


@pytest.fixture
def removals() -> Iterator[EventReaper]:
    made = EventReaper()
    yield made
    made.finish()


def begin(removals: EventReaper, event: Event, gone: list[tuple[Event, threading.Thread]]) -> None:
    removals.begin(cast("ProbeEvent", event), lambda: gone.append((event, threading.current_thread())))


def test_what_is_awaited_comes_first(removals: EventReaper) -> None:
    first, *passing, awaited = (Event() for _ in range(5))
    gone: list[tuple[Event, threading.Thread]] = []
    begin(removals, first, gone)
    for event in passing:
        removals.begin(cast("ProbeEvent", event), lambda: None, is_awaited=False)
    begin(removals, awaited, gone)
    quiesced = removals.quiesced()
    first.may_go.set()
    awaited.may_go.set()
    quiesced.result(PATIENCE_SECONDS)
    removals.collect()
    assert [event for event, _ in gone] == [first, awaited]
    for event in passing:
        event.may_go.set()


def test_awaited_events_leave_their_processes_before_their_turn_comes(removals: EventReaper) -> None:
    first, second, third, passing = (Event() for _ in range(4))
    begin(removals, first, [])
    begin(removals, second, [])
    begin(removals, third, [])
    removals.begin(cast("ProbeEvent", passing), lambda: None, is_awaited=False)
    first.may_go.set()
    wait_for(lambda: not (second.is_patched or third.is_patched), "the processes to be left alone")
    assert (second.thread, third.thread) == (None, None)
    # what came and went by itself may wait for others' arming
    assert passing.is_patched
    for event in (second, third, passing):
        event.may_go.set()


def test_caller_does_not_wait_and_is_told_in_its_own_thread(removals: EventReaper) -> None:
    event, gone = Event(), list[tuple[Event, threading.Thread]]()
    begin(removals, event, gone)
    quiesced = removals.quiesced()
    removals.collect()
    assert not quiesced.done()
    assert gone == []
    event.may_go.set()
    quiesced.result(PATIENCE_SECONDS)
    assert gone == []
    removals.collect()
    removals.collect()
    assert gone == [(event, threading.current_thread())]
    assert event.thread is not threading.current_thread()


def test_settled_is_of_what_was_begun_before_and_may_be_given_up(removals: EventReaper) -> None:
    first, second, gone = Event(), Event(), list[tuple[Event, threading.Thread]]()
    begin(removals, first, gone)
    quiesced = removals.quiesced()
    begin(removals, second, gone)
    # callers that stop waiting must not stop others
    assert not removals.quiesced().cancel()
    first.may_go.set()
    quiesced.result(PATIENCE_SECONDS)
    assert second.thread is None
    second.may_go.set()
    removals.finish()
    assert [event for event, _ in gone] == [first, second]


class Undetachable(Event):
    """Stays in its processes."""

    def disarm(self) -> None:
        raise KeyError("x")


def test_caller_keeps_what_hits_need_of_an_event_that_may_be_patched_still(
    removals: EventReaper, caplog: pytest.LogCaptureFixture
) -> None:
    events, gone = [Undetachable(), Event()], list[tuple[Event, threading.Thread]]()
    for event in events:
        event.may_go.set()
        begin(removals, event, gone)
    removals.finish()
    assert [event for event, _ in gone] == events[1:]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [TracefsRejectedError("uprobe_events", "-:g/e", errno.EBUSY, "busy"), KeyError("x")])
def test_event_that_cannot_be_removed_holds_up_no_other(
    removals: EventReaper, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    events, gone = [Event(error), Event()], list[tuple[Event, threading.Thread]]()
    for event in events:
        event.may_go.set()
        begin(removals, event, gone)
    removals.finish()
    assert [event for event, _ in gone] == events
    assert len(caplog.records) == 1


def test_nothing_is_removed_while_something_is_armed(removals: EventReaper) -> None:
    event, gone = Event(), list[tuple[Event, threading.Thread]]()
    event.may_go.set()
    with removals.arming("objects of uid 1000"):
        begin(removals, event, gone)
        quiesced = removals.quiesced()
        with pytest.raises(TimeoutError):
            quiesced.result(0.1)
        assert event.thread is None
    quiesced.result(PATIENCE_SECONDS)
    assert event.thread is not None


def test_settled_waits_for_no_other_owner(removals: EventReaper) -> None:
    held, gone = Event(), list[tuple[Event, threading.Thread]]()
    own = [Event() for _ in range(3)]
    begin(removals, held, gone)
    for _ in range(50):
        removals.begin(cast("ProbeEvent", held), lambda: None, owner="anne")
    for event in own:
        event.may_go.set()
        removals.begin(cast("ProbeEvent", event), lambda: None, owner="bert")
    quiesced = removals.quiesced("bert")
    # what is under way, and one of Anne's for each of Bert's
    held.may_go.set()
    quiesced.result(PATIENCE_SECONDS)
    assert all(event.thread for event in own)


def test_all_are_out_of_the_processes_before_the_first_is_gone() -> None:
    removals = EventReaper()
    events, gone = [Event() for _ in range(5)], list[tuple[Event, threading.Thread]]()
    for event in events:
        begin(removals, event, gone)
    finishing = threading.Thread(target=removals.finish)
    finishing.start()
    wait_for(lambda: not any(event.is_patched for event in events), "all to be unpatched")
    assert gone == []
    for event in events:
        event.may_go.set()
    finishing.join(PATIENCE_SECONDS)
    assert len(gone) == 5


def test_only_so_many_wait_of_an_owner(removals: EventReaper) -> None:
    event = Event()
    for number in range(3):
        assert removals.why_not("objects of uid 1000", 3) is None, number
        begin_for = "objects of uid 1000"
        removals.begin(cast("ProbeEvent", event), lambda: None, owner=begin_for, is_awaited=False)
    # one of them is being removed
    removals.begin(cast("ProbeEvent", event), lambda: None, owner="objects of uid 1000", is_awaited=False)
    reason = "objects of uid 1000 come and go faster than the kernel removes events: 3 wait"
    assert wait_for(lambda: removals.why_not("objects of uid 1000", 3), "the line to be full") == reason
    assert removals.why_not("objects of uid 1001", 3) is None
    event.may_go.set()


def test_links_of_all_owners_are_closed_together_beside_events_and_arming(removals: EventReaper) -> None:
    event, together = Event(), threading.Barrier(20)
    begin(removals, event, [])
    for number in range(together.parties):
        link = cast("UprobeLink", Link(together))
        removals.begin(link, lambda: None, owner="many" if number else "one")
    with removals.arming("objects of uid 1000"):
        for owner in ("one", "many"):
            removals.quiesced(owner).result(PATIENCE_SECONDS)
    assert together.n_waiting == 0
    assert event.thread is None
    event.may_go.set()


def test_what_waits_for_links_is_told_when_these_are_closed(removals: EventReaper) -> None:
    event, together = Event(), threading.Barrier(2)
    removals.begin(cast("UprobeLink", Link(together)), lambda: None, owner="one")
    removals.begin(cast("ProbeEvent", event), lambda: None, owner="one")
    removals.begin(cast("UprobeLink", Link(together)), lambda: None, owner="one")
    quiesced = removals.quiesced("one")
    with pytest.raises(TimeoutError):
        quiesced.result(0.05)
    event.may_go.set()
    quiesced.result(PATIENCE_SECONDS)


def test_what_is_held_until_the_end_of_a_block_is_waited_for(removals: EventReaper) -> None:
    gone: list[Link] = []
    link = Link(threading.Barrier(1))
    with removals.together("one"):
        removals.begin(cast("UprobeLink", link), lambda: gone.append(link), owner="one")
        quiesced = removals.quiesced("one")
        assert removals.quiesced("other").done()
        assert not quiesced.done()
    quiesced.result(PATIENCE_SECONDS)
    removals.collect()
    assert gone == [link]


def test_an_owners_links_leave_threads_for_others_and_all_get_closed(removals: EventReaper) -> None:
    may_close, closing = threading.Event(), threading.Semaphore(0)

    class Slow(Link):
        def unpatch(self) -> None:
            closing.release()
            assert may_close.wait(PATIENCE_SECONDS)

        disarm = unpatch

    for _ in range(100):
        removals.begin(cast("UprobeLink", Slow(threading.Barrier(1))), lambda: None, owner="many")
    assert all(closing.acquire(timeout=PATIENCE_SECONDS) for _ in range(32))
    assert not closing.acquire(timeout=0.05)
    assert "100 wait" in (removals.why_not("many", 100) or "")
    removals.begin(cast("UprobeLink", Link(threading.Barrier(1))), lambda: None, owner="one")
    removals.quiesced("one").result(PATIENCE_SECONDS)
    quiesced = removals.quiesced("many")
    assert not quiesced.done()
    may_close.set()
    quiesced.result(PATIENCE_SECONDS)
    assert removals.why_not("many", 1) is None
