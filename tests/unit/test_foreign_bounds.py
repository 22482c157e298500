"""Who costs strangers too much loses what costs the most, for longer each time."""

from __future__ import annotations

import pytest

from stapsdtd.model import ObjectKey
from stapsdtd.sessions.foreign_bounds import ForeignBounds

ONE, TWO, THREE = (ObjectKey(1, inode, 1, 1) for inode in range(3))


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bounds(clock: Clock) -> ForeignBounds:
    return ForeignBounds(clock)


def test_dearest_goes_first_until_the_rest_is_within_the_bound(bounds: ForeignBounds, clock: Clock) -> None:
    clock.now += 2
    hits = {("anne", ONE): 300, ("anne", TWO): 5000, ("anne", THREE): 1000, ("bert", TWO): 900}
    found = bounds.judge(hits, {"anne": 600, "bert": 500})
    assert [(client, excess.key, excess.rate) for client, excess in found] == [
        ("anne", TWO, 3150),
        ("anne", THREE, 650),
    ]
    excess = bounds.excess("anne", TWO)
    assert excess is not None
    assert not excess.is_refused
    cost = "cost other users' processes 3,150 hits/s; your role allows 600; armed "
    assert (excess.why_refused, excess.why_confined) == (f"{cost}again after 30 s", f"{cost}in those again after 30 s")
    assert bounds.excess("anne", ONE) is None
    assert bounds.excess("bert", TWO) is None
    assert bounds.exceeded == 2


def test_what_costs_too_much_though_it_is_confined_is_refused(bounds: ForeignBounds, clock: Clock) -> None:
    hits, limits = {("anne", ONE): 10**6}, {"anne": 1000}
    clock.now += 1
    ((_, excess),) = bounds.judge(hits, limits)
    assert not excess.is_refused
    # these may have been before it was confined
    clock.now += 2
    assert bounds.judge(hits, limits) == []
    clock.now += 1
    ((_, excess),) = bounds.judge(hits, limits)
    assert excess.is_refused
    assert bounds.excess("anne", ONE) == excess
    assert (excess.seconds, bounds.exceeded) == (60, 2)


def test_who_has_no_bound_loses_nothing(bounds: ForeignBounds, clock: Clock) -> None:
    clock.now += 1
    assert bounds.judge({("root", ONE): 10**9}, {"anne": 1}) == []


def test_each_time_it_takes_longer_and_is_forgotten_at_last(bounds: ForeignBounds, clock: Clock) -> None:
    waited = []
    for _ in range(10):
        clock.now += 1
        ((_, excess),) = bounds.judge({("anne", ONE): 10**6}, {"anne": 1000})
        waited.append(excess.seconds)
        clock.now += excess.seconds - 0.1
        bounds.forget()
        assert bounds.excess("anne", ONE)
        clock.now += 0.1
        assert bounds.excess("anne", ONE) is None
        bounds.judge({}, {})
    assert waited == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    clock.now += 7200
    bounds.forget()
    clock.now += 1
    bounds.judge({}, {})
    clock.now += 1
    ((_, excess),) = bounds.judge({("anne", ONE): 10**6}, {"anne": 1000})
    assert excess.seconds == 30
