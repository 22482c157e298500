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
    A capital is an entry that does not satisfy one that the daemon tests.
    """
    stacks, shown = CallStacks[str](chain, awaited), list[str]()
    entered: list[tuple[str, int]] = []
    on_chain: list[int] = []
    for number, given_name in enumerate(calls):
        name = given_name.lower()
        if name not in "-!":
            entered.append((name, number))
            if len(on_chain) < len(chain) and chain[len(on_chain)] == name:
                on_chain.append(number)
                if given_name == name:
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


def test_entries_that_the_daemon_leaves_out_lead_to_nothing() -> None:
    assert run("abc", "aBc--bc---") == ["a0", "b5", "c6", "c6-", "b5-", "a0-"]
    assert run("abc", "Abc---") == []
    assert run("ab", "aB-b--") == ["a0", "b3", "b3-", "a0-"]


def test_calls_that_lead_to_very_much_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_stacks, "MAX_HELD", 6)
    stacks = CallStacks[str]("ab", ["a"])
    stacks.entered(1, "a", "a1")
    stacks.entered(2, "a", "a2")
    for _ in range(3):
        stacks.entered(2, "b", "b")
        stacks.returned(2, "b", "b-")
    assert stacks.forgotten == 1
    assert stacks.returned(2, "a", "a2-") == []
    stacks.entered(1, "b", "b")
    assert stacks.returned(1, "a", "a1-") == ["a1", "b", "a1-"]
    # nothing that is shown counts as held
    for _ in range(3):
        assert stacks.entered(3, "a", "a") + stacks.entered(3, "b", "b") + stacks.returned(3, "b", "b-") == []
        assert stacks.returned(3, "a", "a-") == ["a", "b", "b-", "a-"]
    assert stacks.forgotten == 1


def wanted_of(calls: str) -> set[str]:
    """Return the calls that led to one of c, and those of c, if all of them satisfy what is asked of them."""
    around: list[tuple[str, int]] = []
    chains: list[list[int]] = []
    unwanted = set()
    for number, name in enumerate(calls):
        if name in "-!":
            _, first = around.pop()
            if name == "!":
                unwanted.add(first)
            continue
        if name.isupper():
            unwanted.add(number)
        around.append((name.lower(), number))
        chain: list[int] = []
        for function, first in around:
            if len(chain) < len("abc") and "abc"[len(chain)] == function:
                chain.append(first)
        if len(chain) == len("abc") and chain[-1] == number:
            chains.append(chain)
    return {f"{calls[number].lower()}{number}" for chain in chains if unwanted.isdisjoint(chain) for number in chain}


@given(
    st.lists(st.sampled_from("abcABCx-!"), max_size=60),
    st.sampled_from([("", ""), ("", "b"), ("", "abc"), ("a", ""), ("a", "bc"), ("b", "a"), ("c", "ab"), ("abc", "")]),
)
def test_what_is_shown_led_to_each_other(calls: list[str], conditions: tuple[str, str]) -> None:
    """awaited: on what they return, late: on a string of their entries, which the daemon tests."""
    awaited, late = conditions
    valid, functions = "", ""
    for name in calls:
        if name not in "-!":
            functions += name.lower()
            valid += name if name.lower() in late else name.lower()
        elif functions:
            valid += name if functions[-1] in awaited else "-"
            functions = functions[:-1]
    valid += "-" * len(functions)
    shown = run("abc", valid, awaited)
    expected = wanted_of(valid)
    assert {line for line in shown if not line.endswith("-")} == expected
    assert {line.removesuffix("-") for line in shown if line.endswith("-")} == expected


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
