"""The thread that serves queues in turn."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator

import pytest

from stapsdtd.runtime.fair_thread import Backlog, FairThread, Queue
from tests.support import wait_for

SECONDS = 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
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
    made = FairThread("fair", clock=clock)
    yield made
    made.stop()


@pytest.fixture
def held(thread: FairThread) -> Iterator[Held]:
    """The thread is busy with it."""
    work = Held()
    thread.submit(Queue("held"), work, "holding")
    assert work.began.wait(SECONDS)
    yield work
    work.release.set()


A = Queue("a")


def test_results_and_errors_are_the_callers(thread: FairThread) -> None:
    assert thread.submit(A, lambda: threading.current_thread().name).result(SECONDS) == "fair"
    with pytest.raises(ZeroDivisionError):
        thread.submit(A, lambda: 1 // 0).result(SECONDS)
    assert thread.submit(A, lambda: 7).result(SECONDS) == 7


def test_clients_take_turns_and_so_do_a_clients_users(thread: FairThread, held: Held) -> None:
    done: list[str] = []

    def submit(client: str, user: int | None, name: str) -> None:
        thread.submit(Queue(client, user) if client else None, lambda: done.append(name))

    for number in range(3):
        submit("a", 1, f"a1.{number}")
    for user in range(2, 5):
        submit("a", user, f"a{user}")
    for number in range(2):
        submit("b", 1, f"b1.{number}")
    submit("", None, "urgent")
    held.release.set()
    thread.stop()
    assert done == ["urgent", "a1.0", "b1.0", "a2", "b1.1", "a3", "a4", "a1.1", "a1.2"]


def test_steps_take_turns_with_what_others_wait_for(thread: FairThread, held: Held) -> None:
    done: list[str] = []

    def steps(name: str, count: int) -> Generator[None, None, str]:
        for _ in range(count):
            done.append(name)
            yield
        return name.upper()

    a, b = thread.take_turns(A, steps("a", 3)), thread.take_turns(Queue("b"), steps("b", 2))
    held.release.set()
    assert (a.result(SECONDS), b.result(SECONDS)) == ("A", "B")
    assert done == ["a", "b", "a", "b", "a"]


def test_steps_that_fail_or_are_cancelled_go_no_further(thread: FairThread) -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        thread.take_turns(A, failing()).result(SECONDS)
    began, cancelled = threading.Event(), threading.Event()
    taken: list[int] = []

    def cancellable() -> Generator[None, None, None]:
        taken.append(1)
        began.set()
        assert cancelled.wait(SECONDS)
        yield
        taken.append(2)
        yield

    result = thread.take_turns(A, cancellable())
    assert began.wait(SECONDS)
    assert result.cancel()
    cancelled.set()
    thread.submit(A, lambda: None).result(SECONDS)
    thread.submit(A, lambda: None).result(SECONDS)
    assert taken == [1]


def test_what_is_whole_is_cancelled_before_it_begins_or_not_at_all(thread: FairThread) -> None:
    began, go_on = threading.Event(), threading.Event()

    def steps() -> Generator[None, None, int]:
        began.set()
        assert go_on.wait(SECONDS)
        yield
        return 7

    whole = thread.take_turns(A, steps(), is_whole=True)
    never = thread.take_turns(A, steps(), is_whole=True)
    assert began.wait(SECONDS)
    assert never.cancel()
    assert not whole.cancel()
    go_on.set()
    assert whole.result(SECONDS) == 7


def test_what_has_not_begun_can_be_cancelled_and_is_forgotten(thread: FairThread, held: Held) -> None:
    class Large:
        def __call__(self) -> None:
            done.append(self)

    done: list[Large] = []
    large = [Large() for _ in range(3)]
    futures = [thread.submit(A, each) for each in large]
    alive = weakref.ref(large[1])
    assert thread.waiting(A) == 3
    assert futures[1].cancel()
    del large
    assert alive() is None
    assert thread.backlog().waiting == 2
    held.release.set()
    futures[2].result(SECONDS)
    assert len(done) == 2
    assert thread.waiting(A) == 0


def test_asking_waits_for_no_queue(thread: FairThread, held: Held) -> None:
    last = thread.submit(A, lambda: None)
    asked = thread.ask()
    asked.add_done_callback(lambda _: order.append(last.done()))
    order: list[bool] = []
    assert not asked.done()
    held.release.set()
    last.result(SECONDS)
    assert order == [False]


def test_asking_does_not_wake_a_thread_that_has_nothing_to_do(thread: FairThread, clock: Clock) -> None:
    def is_left_alone() -> bool:
        before = clock.asked
        thread.ask().result(SECONDS)
        return clock.asked == before

    wait_for(is_left_alone, "the thread to have nothing to do", SECONDS)


def test_backlog(thread: FairThread, held: Held, clock: Clock) -> None:
    clock.now += 12.5
    last = [thread.submit(A, lambda: None) for _ in range(3)][-1]
    assert thread.backlog() == Backlog(3, "holding", 12.5)
    assert last.cancel()
    assert thread.backlog(A.client).waiting == 2
    assert thread.backlog("another") == Backlog()
    last = thread.submit(A, lambda: None)
    held.release.set()
    last.result(SECONDS)
    thread.ask().result(SECONDS)
    assert thread.backlog() == Backlog()


def test_stop_waits_for_what_was_submitted(clock: Clock) -> None:
    thread, held = FairThread("fair", clock=clock), Held()
    thread.submit(A, held)
    last = thread.submit(Queue("b"), lambda: 7)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    held.release.set()
    stopping.join(SECONDS)
    assert last.result(0) == 7
    with pytest.raises(RuntimeError, match="stopping"):
        thread.submit(A, lambda: None)
