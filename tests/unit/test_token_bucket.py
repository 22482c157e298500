"""Tokens by a clock that stands until it is moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.sessions.token_bucket import TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_second_gives_so_many() -> None:
    clock = Clock()
    bucket = TokenBucket(10, clock)
    assert [bucket.take(4) for _ in range(4)] == [4, 4, 2, 0]
    clock.now += 0.5
    assert [bucket.take(4), bucket.take(4)] == [4, 1]
    clock.now += 100
    assert bucket.take(100) == 10


def test_what_is_left_of_a_token_is_not_forgotten() -> None:
    clock = Clock()
    bucket = TokenBucket(1, clock)
    assert bucket.take(1) == 1
    granted = 0
    for _ in range(64):
        clock.now += 0.125
        granted += bucket.take(1)
    assert granted == 8


def test_full_when_nobody_used_it() -> None:
    clock = Clock()
    bucket = TokenBucket(10, clock)
    found = [bucket.is_full]
    bucket.take(1)
    found.append(bucket.is_full)
    clock.now += 0.1
    assert [*found, bucket.is_full] == [True, False, True]


@pytest.mark.parametrize("rate", [1, 7, 1000])
@given(steps=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), max_size=30))
def test_never_more_than_was_given(rate: int, steps: list[tuple[int, int]]) -> None:
    """And never less than is there: who always asks for more gets all of it."""
    clock = Clock()
    bucket = TokenBucket(rate, clock)
    granted = elapsed = 0
    for wait_ms, wanted in steps:
        clock.now += wait_ms / 1000
        elapsed += wait_ms
        got = bucket.take(wanted)
        assert 0 <= got <= min(wanted, rate)
        granted += got
    assert granted <= rate + elapsed * rate / 1000 + 1e-6
