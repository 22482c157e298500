"""The thread that serves queues in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stapsdtd.runtime.fair_thread import Backlog, FairThread

SECONDS = 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Held:
    """Work that runs until it is released."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.release.wait(SECONDS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def thread(clock: Clock) -> Iterator[FairThread]:
    made = FairThread("fair", clock)
    yield made
    made.stop()


@pytest.fixture
def held(thread: FairThread) -> Iterator[Held]:
    """The thread is busy with it."""
    work = Held()
    thread.submit("held", work, "holding")
    assert work.began.wait(SECONDS)
    yield work
    work.release.set()


def test_results_and_errors_are_the_callers(thread: FairThread) -> None:
    assert thread.submit("a", lambda: threading.current_thread().name).result(SECONDS) == "fair"
    with pytest.raises(ZeroDivisionError):
        thread.submit("a", lambda: 1 // 0).result(SECONDS)
    assert thread.submit("a", lambda: 7).result(SECONDS) == 7


def test_queues_take_turns_and_keep_their_order(thread: FairThread, held: Held) -> None:
    done: list[str] = []
    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    last = [thread.submit(name[0], lambda name=name: done.append(name)) for name in names]  # type: ignore[misc]
    held.release.set()
    for future in last:
        future.result(SECONDS)
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_has_not_begun_can_be_cancelled(thread: FairThread, held: Held) -> None:
    done: list[int] = []
    futures = [thread.submit("a", lambda number=number: done.append(number)) for number in range(3)]  # type: ignore[misc]
    assert futures[1].cancel()
    held.release.set()
    futures[2].result(SECONDS)
    assert done == [0, 2]


def test_backlog(thread: FairThread, held: Held, clock: Clock) -> None:
    clock.now += 12.5
    last = [thread.submit("a", lambda: None) for _ in range(3)][-1]
    assert thread.backlog() == Backlog(3, "holding", 12.5)
    held.release.set()
    last.result(SECONDS)
    thread.ask().result(SECONDS)
    assert thread.backlog() == Backlog()


def test_stop_waits_for_what_was_submitted(clock: Clock) -> None:
    thread, held = FairThread("fair", clock), Held()
    thread.submit("a", held)
    last = thread.submit("b", lambda: 7)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    held.release.set()
    stopping.join(SECONDS)
    assert last.result(0) == 7
    with pytest.raises(RuntimeError, match="stopping"):
        thread.submit("a", lambda: None)
