"""Owners take turns, and who has much to remove waits for those who arm something."""

from __future__ import annotations

import pytest

from stapsdtd.capture.bpf.turns import Turns

ANNE, BERT, CARL = "objects of uid 1", "objects of uid 2", "subscriptions of carl"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> Turns[str]:
    return Turns[str](clock)


def put(turns: Turns[str], owner: str, *names: str, is_awaited: bool = False) -> None:
    for name in names:
        turns.put(owner, name, is_awaited=is_awaited)


def taken(turns: Turns[str]) -> list[str]:
    found = []
    while (item := turns.take()) is not None:
        found.append(item)
    return found


def test_owners_take_turns_and_what_is_awaited_comes_first(turns: Turns[str]) -> None:
    put(turns, ANNE, "a1", "a2", "a3")
    put(turns, BERT, "b1", "b2")
    put(turns, CARL, "c1", "c2", is_awaited=True)
    put(turns, BERT, "b!", is_awaited=True)
    assert taken(turns) == ["c1", "b!", "c2", "a1", "b1", "a2", "b2", "a3"]


def test_who_has_much_is_behind_others(turns: Turns[str]) -> None:
    put(turns, ANNE, *(f"a{number}" for number in range(100)))
    put(turns, BERT, "b1", "b2")
    assert taken(turns)[:3] == ["b1", "b2", "a0"]


def test_who_has_much_waits_while_others_arm(turns: Turns[str], clock: Clock) -> None:
    put(turns, ANNE, *(f"a{number}" for number in range(100)))
    put(turns, BERT, "b1")
    turns.armed(BERT)
    assert taken(turns) == ["b1"]
    assert turns.wait == 0.5
    clock.now += 0.4
    turns.armed(BERT)
    clock.now += 0.4
    assert turns.take() is None
    clock.now += 0.1
    assert turns.take() == "a0"
    # its own arming is no reason to wait, nor is that of another who does the same
    turns.armed(ANNE)
    assert turns.take() == "a1"
    put(turns, BERT, *(f"b{number}" for number in range(100)))
    turns.armed(BERT)
    assert turns.take() == "a2"
    turns.armed(CARL)
    assert turns.take() is None
    assert turns.take(is_last=True) == "b0"


def test_who_arms_all_the_time_does_not_stop_others_altogether(turns: Turns[str], clock: Clock) -> None:
    put(turns, ANNE, *(f"a{number}" for number in range(100)))
    found = []
    for _ in range(600):
        turns.armed(BERT)
        found += taken(turns)
        clock.now += 0.1
    assert found == ["a0", "a1", "a2", "a3", "a4"]


def test_few_are_removed_at_once_and_much_is_forgiven_in_time(turns: Turns[str], clock: Clock) -> None:
    put(turns, ANNE, *(f"a{number}" for number in range(16)))
    turns.armed(BERT)
    assert len(taken(turns)) == 16
    put(turns, ANNE, "one more")
    assert taken(turns) == []
    clock.now += 5
    turns.armed(BERT)
    assert taken(turns) == ["one more"]


def test_room_is_shared_by_those_who_need_some(turns: Turns[str]) -> None:
    assert turns.share == 4096
    put(turns, ANNE, "a1", "a2")
    put(turns, BERT, "b1")
    put(turns, BERT, "b!", is_awaited=True)
    assert (turns.count(ANNE), turns.count(BERT), turns.count(CARL)) == (2, 2, 0)
    assert turns.share == 2048
    put(turns, CARL, "c1")
    assert turns.share == 1365
