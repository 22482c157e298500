"""Which wall-clock time belongs to a monotonic one, before and after the clock was set."""

from __future__ import annotations

import select
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.kernel.clock_sets import ClockSets
from stapsdtd.runtime import wall_clock
from stapsdtd.runtime.wall_clock import ClockChange, Reading, WallClock
from tests.unit.settable_clock import OFFSET_NS, SECOND_NS, SettableClock


class Steps:
    """A clock whose monotonic time a test tells, too."""

    def __init__(self) -> None:
        self.now_ns, self.reading = 1000, Reading(OFFSET_NS, 0, 10)
        self.clock = WallClock(lambda: self.reading, lambda: self.now_ns)

    def at(self, now_ns: int, by_ns: int, suspended_ns: int = 0) -> None:
        self.now_ns = now_ns
        offset_ns, suspended_before_ns, error_ns = self.reading
        self.reading = Reading(offset_ns + by_ns, suspended_before_ns + suspended_ns, error_ns)
        self.clock.look()


def test_times_before_a_step_stay_as_they_were() -> None:
    steps = Steps()
    assert steps.clock.time_ns(1500) == OFFSET_NS + 1500
    steps.at(2000, 3600 * SECOND_NS)
    steps.at(3000, -7200 * SECOND_NS)
    seen = [steps.clock.time_ns(at) - OFFSET_NS for at in (0, 1500, 1999, 2000, 2999, 3000, 9000)]
    hour = 3600 * SECOND_NS
    assert seen == [0, 1500, 1999, 2000 + hour, 2999 + hour, 3000 - hour, 9000 - hour]


def test_steps_are_told_since_a_time() -> None:
    steps = Steps()
    assert steps.clock.changes_after(0) == []
    steps.at(2000, 5000)
    steps.at(3000, -700)
    first, second = ClockChange(2000, OFFSET_NS + 5000, 5000, 0), ClockChange(3000, OFFSET_NS + 4300, -700, 0)
    assert steps.clock.changes_after(0) == [first, second]
    assert steps.clock.changes_after(2000) == [second]
    assert steps.clock.changes_after(3000) == []
    assert second.time_ns == OFFSET_NS + 7300


def test_what_reading_the_clocks_takes_is_no_step() -> None:
    steps = Steps()
    steps.at(2000, 20)
    assert steps.clock.changes_after(0) == []
    steps.at(3000, 1)
    assert [change.by_ns for change in steps.clock.changes_after(0)] == [21]


def test_a_suspension_is_told_from_a_step() -> None:
    clock = SettableClock()
    clock.set_by(0, suspended_ns=60 * SECOND_NS)
    clock.set_by(-SECOND_NS, suspended_ns=5 * SECOND_NS)
    told = [(change.by_ns, change.suspended_ns) for change in clock.changes_after(0)]
    assert told == [(0, 60 * SECOND_NS), (-SECOND_NS, 5 * SECOND_NS)]
    now_ns = time.monotonic_ns()
    assert clock.time_ns(now_ns) == now_ns + OFFSET_NS + 64 * SECOND_NS


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(-1000, 1000)), max_size=5),
    st.lists(st.integers(0, 2000), max_size=20),
)
def test_runs_have_the_times_of_their_events(changes: list[tuple[int, int]], times: list[int]) -> None:
    steps = Steps()
    for after_ns, by_ns in changes:
        steps.at(steps.now_ns + after_ns, by_ns)
    seen: list[int] = []
    for begin, end, offset_ns in steps.clock.spans(np.array(times, np.int64)):
        assert begin == len(seen) < end
        seen += [at + offset_ns for at in times[begin:end]]
    assert seen == [steps.clock.time_ns(at) for at in times]


def test_who_waits_is_woken_until_it_has_enough() -> None:
    clock, woken = SettableClock(), []
    end = clock.wake_with(lambda: woken.append(1))
    clock.look()
    clock.set_by(SECOND_NS)
    end()
    clock.set_by(SECOND_NS)
    assert woken == [1]


def test_the_oldest_of_too_many_steps_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall_clock, "_MOST_CHANGES", 3)
    steps = Steps()
    for number in range(5):
        steps.at(2000 + number, 1000)
    assert [change.monotonic_ns for change in steps.clock.changes_after(0)] == [2003, 2004]
    assert steps.clock.time_ns(0) == OFFSET_NS + 3000


def test_the_hosts_clocks_agree_with_themselves() -> None:
    clock, sets = WallClock(), ClockSets()
    try:
        assert abs(clock.time_ns(time.monotonic_ns()) - time.time_ns()) < SECOND_NS
        for _ in range(100):
            clock.look()
        assert clock.changes_after(0) == []
        # nobody has set it
        assert select.select([sets], [], [], 0)[0] == []
        sets.read()
    finally:
        sets.close()
