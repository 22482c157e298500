"""Full garbage collections get a small share of time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import Future
from weakref import ref

import pytest

from stapsdtd.runtime import garbage
from stapsdtd.runtime.futures import once_done
from stapsdtd.runtime.garbage import FullCollections


class Clock:
    """seconds: how long a collection takes."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.collections = 0
        self._seconds = seconds

    def __call__(self) -> float:
        return self.now

    def collect(self) -> None:
        self.collections += 1
        self.now += self._seconds


@pytest.fixture
def young(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many young collections there have been, as the only element."""
    counts = [0]
    monkeypatch.setattr(garbage, "_young_collections", lambda: counts[0])
    loop = asyncio.new_event_loop()
    # for the timer, which nobody waits for
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    yield counts
    loop.close()


def test_the_longer_one_takes_the_later_comes_the_next(young: list[int]) -> None:
    clock = Clock(seconds=0.3)
    collections = FullCollections(clock.collect, clock)
    for _ in range(20):
        clock.now += 30
        young[0] += 100
        collections.look()
    # 600 s have passed, and 0.3 s are a thousandth of 300 s
    assert clock.collections == 2


def test_nothing_is_collected_where_nothing_was_made(young: list[int]) -> None:
    clock = Clock(seconds=0.0)
    collections = FullCollections(clock.collect, clock)
    clock.now += 3600
    counts = []
    for young[0] in (99, 100):
        collections.look()
        counts.append(clock.collections)
    assert counts == [0, 1]


def test_a_future_lets_go_of_what_was_called() -> None:
    class Owner:
        future: Future[int]

    seen: list[int] = []

    def settled() -> ref[Owner]:
        owner = Owner()
        owner.future = Future()
        once_done(owner.future, lambda done: seen.append(done.result() if owner.future is done else 0))
        owner.future.set_result(3)
        return ref(owner)

    gc.disable()
    try:
        assert settled()() is None
    finally:
        gc.enable()
    assert seen == [3]
