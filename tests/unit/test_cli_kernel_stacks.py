"""Which calls led to each other."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli import kernel_stacks
from stapsdtd.cli.kernel_stacks import CallStacks


def run(chain: str, calls: str, awaited: Collection[str] = ()) -> list[str]:
    """Return what is shown of calls in one thread, as the server delivers them.

    calls: names of functions as they are entered, and for each return `-`, or `!` if it does not satisfy a condition.
    """
    stacks, shown = CallStacks[str](chain, awaited), list[str]()
    entered: list[tuple[str, int]] = []
    on_chain: list[int] = []
    for number, name in enumerate(calls):
        if name not in "-!":
            entered.append((name, number))
            if len(on_chain) < len(chain) and chain[len(on_chain)] == name:
                on_chain.append(number)
                shown += stacks.entered(1, name, f"{name}{number}")
            continue
        function, first = entered.pop()
        if first in on_chain:
            on_chain.remove(first)
            if name == "-":
                shown += stacks.returned(1, function, f"{function}{first}-")
    return shown


def test_directly_or_not() -> None:
    assert run("abc", "abc---") == ["a0", "b1", "c2", "c2-", "b1-", "a0-"]
    assert run("abc", "axbxc-----") == ["a0", "b2", "c4", "c4-", "b2-", "a0-"]
    assert run("abc", "ab--") == run("abc", "bca---") == run("abc", "a-b-c-") == []


def test_each_call_of_the_last_is_shown() -> None:
    assert run("ab", "ab-b--") == ["a0", "b1", "b1-", "b3", "b3-", "a0-"]
    assert run("abc", "abc--bc---") == ["a0", "b1", "c2", "c2-", "b1-", "b5", "c6", "c6-", "b5-", "a0-"]
    assert run("abc", "ab-bc---") == ["a0", "b3", "c4", "c4-", "b3-", "a0-"]


def test_recursion() -> None:
    assert run("ab", "aab---") == ["a0", "b2", "b2-", "a0-"]
    assert run("ab", "abb---") == ["a0", "b1", "b1-", "a0-"]


def test_a_condition_on_the_last_one_decides_when_it_returns() -> None:
    assert run("abc", "abc---", "c") == ["a0", "b1", "c2", "c2-", "b1-", "a0-"]
    assert run("abc", "abc!--", "c") == []
    assert run("abc", "abc!c---", "c") == ["a0", "b1", "c4", "c4-", "b1-", "a0-"]
    assert run("abc", "abc-c!--", "c") == ["a0", "b1", "c2", "c2-", "b1-", "a0-"]


def test_a_condition_on_another_one_decides_on_all_that_it_led_to() -> None:
    assert run("abc", "abc---", "b") == ["a0", "b1", "c2", "c2-", "b1-", "a0-"]
    assert run("abc", "abc-!-", "b") == []
    assert run("abc", "abc-!bc---", "b") == ["a0", "b5", "c6", "c6-", "b5-", "a0-"]
    assert run("abc", "abc--!", "a") == run("abc", "abc!--", "ac") == run("abc", "abc--!", "ac") == []
    assert run("abc", "abc-c!--", "ac") == ["a0", "b1", "c2", "c2-", "b1-", "a0-"]
    assert run("abc", "ab--", "a") == []


def test_threads_are_apart_and_forgotten() -> None:
    stacks = CallStacks[str]("ab")
    assert stacks.entered(1, "a", "a") == stacks.entered(2, "b", "b") == []
    assert stacks.entered(1, "b", "b") == ["a", "b"]
    stacks.forget()
    assert stacks.returned(1, "b", "b-") == stacks.entered(1, "b", "b") == []


def test_calls_that_nobody_saw() -> None:
    stacks = CallStacks[str]("ab")
    assert stacks.returned(1, "b", "b-") == stacks.returned(1, "a", "a-") == []
    assert stacks.entered(1, "a", "a") + stacks.entered(1, "b", "b") == ["a", "b"]
    # the return of b was missed
    assert stacks.returned(1, "a", "a-") == ["a-"]
    assert stacks.entered(1, "b", "b") == []


def test_calls_that_never_return_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_stacks, "MAX_THREADS", 2)
    stacks = CallStacks[str]("ab")
    for tid in (1, 2, 1, 3):
        stacks.entered(tid, "a", f"a{tid}")
    assert stacks.forgotten == 1
    assert stacks.entered(2, "b", "b") == []
    assert stacks.entered(1, "b", "b") == ["a1", "b"]


@given(st.lists(st.sampled_from("abx-!"), max_size=60), st.sampled_from(["", "a", "b", "ab"]))
def test_what_is_shown_as_entered_is_shown_as_it_returns(calls: list[str], awaited: str) -> None:
    depth, valid = 0, ""
    for name in calls:
        if name not in "-!" or depth:
            depth += 1 if name not in "-!" else -1
            valid += name if awaited or name != "!" else "-"
    shown = run("ab", valid + "-" * depth, awaited)
    returned = [line.removesuffix("-") for line in shown if line.endswith("-")]
    assert {line for line in shown if not line.endswith("-")} >= set(returned)
    if awaited in {"ab", ""}:
        assert sorted(line for line in shown if not line.endswith("-")) == sorted(returned)
