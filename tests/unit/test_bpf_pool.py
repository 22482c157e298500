from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.capture.bpf.pool import Pool, Shared, TableFullError

CONTENTS = {"a": 1, "b": 2, "c": 3, "d": 2}


def longest_gap(runs: list[range], first: int, end: int) -> int:
    """Answer how many entries in a row are free."""
    bounds = sorted([first, end, *(bound for run in runs for bound in (run.start, run.stop))])
    return max(behind - before for before, behind in zip(bounds[::2], bounds[1::2], strict=True))


@given(
    first=st.integers(0, 3),
    entries=st.integers(1, 14),
    steps=st.lists(st.integers(1, 6) | st.integers(-8, -1), max_size=60),
)
def test_no_entry_is_lent_twice_at_a_time_and_none_is_lost(first: int, entries: int, steps: list[int]) -> None:
    """A step allocates so many entries or, where it is negative, gives back one of the runs."""
    pool = Pool("things", first + entries, first)
    runs: list[range] = []
    for step in steps:
        if step < 0:
            if runs:
                run = runs.pop(step % len(runs))
                pool.free(run.start, len(run))
            continue
        try:
            start = pool.allocate(step)
        except TableFullError:
            assert longest_gap(runs, first, first + entries) < step
        else:
            assert first <= start <= first + entries - step
            assert all(start + step <= run.start or run.stop <= start for run in runs)
            runs.append(range(start, start + step))
    for run in runs:
        pool.free(run.start, len(run))
    assert pool.allocate(entries) == first


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbours_are_joined_in_whatever_order_they_come_back(order: tuple[int, ...]) -> None:
    pool = Pool("things", 6)
    starts = [pool.allocate(2) for _ in range(3)]
    for position in order:
        pool.free(starts[position], 2)
    assert pool.allocate(6) == 0


def test_full_table_is_named_and_keeps_what_it_has() -> None:
    pool = Pool("tests", 4)
    assert pool.allocate(3) == 0
    with pytest.raises(TableFullError, match="the bpf engine's table of tests is full"):
        pool.allocate(2)
    assert pool.allocate(1) == 3


def test_room_that_is_scattered_is_no_run() -> None:
    pool = Pool("things", 4)
    for _ in range(4):
        pool.allocate(1)
    pool.free(0, 1)
    pool.free(2, 1)
    with pytest.raises(TableFullError):
        pool.allocate(2)


def test_no_entries_given_back_are_none() -> None:
    pool = Pool("things", 4)
    assert [pool.allocate(2), pool.allocate(2)] == [0, 2]
    pool.free(1, 0)
    with pytest.raises(TableFullError):
        pool.allocate(1)
    pool.free(2, 2)
    pool.free(1, 0)
    pool.free(0, 2)
    assert pool.allocate(4) == 0


def test_same_content_is_lent_once() -> None:
    shared = Shared[str](Pool("things", 8))
    assert [shared.allocate("ab", 2), shared.allocate("cde", 3), shared.allocate("ab", 2)] == [
        (0, True),
        (2, True),
        (0, False),
    ]


def test_content_is_gone_when_the_last_one_gives_it_back() -> None:
    shared = Shared[str](Pool("things", 2))
    shared.allocate("ab", 2)
    shared.allocate("ab", 2)
    shared.free("ab")
    with pytest.raises(TableFullError):
        shared.allocate("cd", 2)
    shared.free("ab")
    assert shared.allocate("cd", 2) == (0, True)


def test_content_for_which_there_was_no_room_is_new_later() -> None:
    shared = Shared[str](Pool("things", 2))
    shared.allocate("ab", 2)
    with pytest.raises(TableFullError):
        shared.allocate("c", 1)
    shared.free("ab")
    assert shared.allocate("c", 1) == (0, True)


@given(st.lists(st.tuples(st.sampled_from(sorted(CONTENTS)), st.booleans()), max_size=60))
def test_contents_in_use_never_overlap(steps: list[tuple[str, bool]]) -> None:
    """A step allocates a content or, where it has users, gives it back."""
    shared = Shared[str](Pool("things", 32))
    users = Counter[str]()
    places: dict[str, range] = {}
    for content, is_lent in steps:
        if is_lent:
            start, is_new = shared.allocate(content, CONTENTS[content])
            assert is_new == (not users[content])
            if is_new:
                run = range(start, start + CONTENTS[content])
                assert all(not set(run) & set(place) for other, place in places.items() if users[other])
                places[content] = run
            assert places[content].start == start
            users[content] += 1
        elif users[content]:
            shared.free(content)
            users[content] -= 1
