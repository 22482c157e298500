"""Every value is in the bucket whose bounds hold it, and buckets are as wide as they are said to be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.aggregate.buckets import FINE, GREATEST, LEAST, POWERS_OF_TWO, Buckets, Edges, linear, log_linear

SIGNED = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 62).map(lambda bit: 1 << bit) | st.integers(-70, 70)
UNSIGNED = st.integers(0, (1 << 64) - 1) | st.integers(0, 63).map(lambda bit: (1 << bit) - 1)

KINDS: dict[str, Buckets] = {
    "powers": POWERS_OF_TWO,
    "fine": FINE,
    "linear": linear(-20, 1000, 7),
    "log_linear": log_linear(10, 0, 6, 20),
}


@pytest.mark.parametrize("buckets", KINDS.values(), ids=KINDS)
@given(values=st.lists(SIGNED, min_size=2, max_size=50))
def test_signed_values_are_within_their_bounds(buckets: Buckets, values: list[int]) -> None:
    check(buckets, values, buckets.numbers(np.array(values, np.int64)).tolist())


@pytest.mark.parametrize("buckets", KINDS.values(), ids=KINDS)
@given(values=st.lists(UNSIGNED, min_size=2, max_size=50))
def test_unsigned_values_are_within_their_bounds(buckets: Buckets, values: list[int]) -> None:
    check(buckets, values, buckets.numbers(np.array(values, np.uint64)).tolist())


def check(buckets: Buckets, values: list[int], numbers: list[int]) -> None:
    for value, number in zip(values, numbers, strict=True):
        low, high = buckets.bounds(number)
        assert low <= value <= high
    for (one, first), (other, second) in pairwise(sorted(zip(values, numbers, strict=True))):
        assert first <= second
        assert (first == second) == (buckets.bounds(first) == buckets.bounds(second)), (one, other)


def test_powers_of_two() -> None:
    values = [-9, -8, -1, 0, 1, 2, 3, 4, 7, 8]
    bounds = [POWERS_OF_TWO.bounds(number) for number in POWERS_OF_TWO.numbers(np.array(values)).tolist()]
    expected = [(-15, -8)] * 2 + [(-1, -1), (0, 0), (1, 1), (2, 3), (2, 3), (4, 7), (4, 7), (8, 15)]
    assert bounds == expected


@given(value=st.integers(32, (1 << 64) - 1))
def test_fine_buckets_are_at_most_a_thirtysecond_wide(value: int) -> None:
    (number,) = FINE.numbers(np.array([value], np.uint64)).tolist()
    low, high = FINE.bounds(number)
    assert (high - low + 1) * 32 <= low


def test_linear_buckets_have_open_ends() -> None:
    buckets = linear(0, 25, 10)
    assert [buckets.bounds(number) for number in range(5)] == [
        (LEAST, -1), (0, 9), (10, 19), (20, 24), (25, GREATEST),
    ]  # fmt: skip


def test_as_many_linear_buckets_as_allowed() -> None:
    assert len(linear(0, 2048, 1).edges) == len(linear(0, 4095, 2).edges) == 2049


def test_log_linear_buckets_are_steps_of_each_power() -> None:
    above = (*range(1, 11), *range(20, 101, 10), *range(200, 1001, 100))
    edges = log_linear(10, 0, 2, 10).edges
    assert edges[len(above) :] == above
    # a bucket of negative values has the same values with the other sign
    assert edges[: len(above)] == tuple(1 - edge for edge in reversed(above))
    buckets = log_linear(10, 1, 1, 10)
    values = [-100, -99, -90, -89, -11, -10, -9, 9, 10, 99, 100]
    assert [buckets.bounds(number) for number in buckets.numbers(np.array(values)).tolist()] == [
        (LEAST, -100), (-99, -90), (-99, -90), (-89, -80), (-19, -10), (-19, -10), (-9, 9), (-9, 9), (10, 19),
        (90, 99), (100, GREATEST),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: linear(0, 10, 0), "step must be at least 1"),
        (lambda: linear(10, 10, 1), "low must be less than high"),
        (lambda: linear(0, 1 << 63, 1 << 60), "numbers of 64 bits"),
        (lambda: linear(0, 1 << 40, 1), "buckets; the limit is 2048"),
        (lambda: linear(0, 2049, 1), "makes 2049 buckets; the limit is 2048"),
        (lambda: linear(0, 4097, 2), "makes 2049 buckets; the limit is 2048"),
        (lambda: log_linear(1, 0, 1, 2), "factor must be at least 2"),
        (lambda: log_linear(10, 3, 2, 10), "exponents must rise"),
        (lambda: log_linear(10, 0, 18, 10), "within 63 bits"),
        (lambda: log_linear(10, 0, 2, 15), "multiple of the factor"),
        (lambda: log_linear(2, 0, 61, 1024), "more than 2048 buckets"),
    ],
)
def test_impossible_buckets_are_refused(make: Callable[[], Edges], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.parametrize(
    "make",
    [lambda: log_linear(3, 0, 1 << 40, 3), lambda: log_linear(2, 61, 61, 1 << 61), lambda: log_linear(2, 63, 63, 2)],
)
def test_what_would_take_all_memory_is_refused_before(make: Callable[[], Edges]) -> None:
    with pytest.raises(ValueError, match=r"exponents|steps"):
        make()


def test_the_least_number_has_no_bounds_beyond_64_bits() -> None:
    (number,) = FINE.numbers(np.array([LEAST], np.int64)).tolist()
    assert FINE.bounds(number) == (LEAST, LEAST)
