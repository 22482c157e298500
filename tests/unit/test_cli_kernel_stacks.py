"""Which calls led to each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli.kernel_stacks import MAX_DEPTH, CallStacks


def run(stacks: CallStacks[str], calls: str, tid: int = 1) -> list[str]:
    """calls: names of functions as they are entered, and `-` for each return."""
    shown: list[str] = []
    entered: list[tuple[str, int]] = []
    for number, name in enumerate(calls):
        if name == "-":
            function, first = entered.pop()
            shown += stacks.returned(tid, function, f"{function}{first}-")
        else:
            entered.append((name, number))
            shown += stacks.entered(tid, name, f"{name}{number}")
    return shown


def test_directly_or_not() -> None:
    assert run(CallStacks("abc"), "abc---") == ["a0", "b1", "c2", "c2-", "b1-", "a0-"]
    assert run(CallStacks("abc"), "axbxc-----") == ["a0", "b2", "c4", "c4-", "b2-", "a0-"]
    assert run(CallStacks("abc"), "ab--") == run(CallStacks("abc"), "bca---") == run(CallStacks("abc"), "a-b-c-") == []


def test_each_call_of_the_last_is_shown() -> None:
    assert run(CallStacks("ab"), "ab-b--") == ["a0", "b1", "b1-", "b3", "b3-", "a0-"]


def test_recursion() -> None:
    assert run(CallStacks("ab"), "aab---") == ["a0", "b2", "b2-", "a0-"]
    assert run(CallStacks("aa"), "aaa---") == ["a0", "a1", "a1-", "a0-"]


def test_threads_are_apart_and_forgotten() -> None:
    stacks = CallStacks[str]("ab")
    assert stacks.entered(1, "a", "a") == stacks.entered(2, "b", "b") == []
    assert stacks.entered(1, "b", "b") == ["a", "b"]
    stacks.exited(1)
    assert stacks.returned(1, "b", "b-") == []
    assert stacks.entered(1, "b", "b") == []
    stacks.forget()
    assert stacks.returned(2, "b", "b-") == []


def test_returns_of_calls_that_nobody_saw() -> None:
    stacks = CallStacks[str]("ab")
    assert stacks.returned(1, "b", "b-") == []
    assert run(stacks, "ab") == ["a0", "b1"]
    assert stacks.returned(1, "x", "x-") == []
    # that of b was missed
    assert stacks.returned(1, "a", "a-") == ["a-"]
    assert stacks.entered(1, "b", "b") == []


def test_deeper_calls_are_counted_and_miscount_no_return() -> None:
    stacks = CallStacks[str]("ab")
    deep = MAX_DEPTH + 6
    shown = run(stacks, f"a{'x' * (deep - 1)}b{'-' * deep}b--")
    last = 2 * deep + 1
    assert stacks.too_deep == 7
    assert shown == ["a0", f"b{last}", f"b{last}-", "a0-"]


@given(st.lists(st.sampled_from("abx-"), max_size=60))
def test_what_is_shown_as_entered_is_shown_as_it_returns(calls: list[str]) -> None:
    depth, valid = 0, ""
    for name in calls:
        if name != "-" or depth:
            depth += 1 if name != "-" else -1
            valid += name
    shown = run(CallStacks("ab"), valid + "-" * depth)
    returned = [line.removesuffix("-") for line in shown if line.endswith("-")]
    assert sorted(line for line in shown if not line.endswith("-")) == sorted(returned)
