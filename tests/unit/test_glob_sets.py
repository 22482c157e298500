"""Sets of globs match what each glob matches, however many texts are matched, and in steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import get_ident

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stapsdtd.catalog import glob_sets
from stapsdtd.catalog.glob_sets import GlobSet
from stapsdtd.globs import Glob
from stapsdtd.runtime.fair_thread import finish

_ALPHABET = "ab-z!]^[*?\\\n\0é\U0001f600"
_SETTINGS = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])

globs = st.lists(st.none() | st.text(_ALPHABET, max_size=12), min_size=1, max_size=20)
texts = st.sets(st.text(_ALPHABET, max_size=20), max_size=40)


def expected(patterns: Sequence[str | None], text: str) -> int:
    """Each glob by itself, which test_globs.py compares with the standard library."""
    matching = (each is not None and (not each or Glob(each).matches(text)) for each in patterns)
    return sum(1 << number for number, matches in enumerate(matching) if matches)


def check(patterns: Sequence[str | None], some: Collection[str]) -> None:
    found = GlobSet(patterns)
    by_text = {text: expected(patterns, text) for text in some}
    assert finish(found.of_all(some)) == by_text
    assert {text: found.of(text) for text in some} == by_text


@pytest.fixture
def _with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glob_sets, "_FEW_MATCHES", 0)


@_SETTINGS
@given(globs, texts)
@example(["a*b", "?", "", None, "**", "a", "[ab]*[!a]"], {"", "a", "b", "ab", "aab", "abab"})
@pytest.mark.usefixtures("_with_states")
def test_a_set_matches_what_its_globs_match(patterns: list[str | None], some: set[str]) -> None:
    check(patterns, some)


@_SETTINGS
@given(globs, texts)
@pytest.mark.usefixtures("_with_states")
def test_with_few_texts_at_once_and_few_states(
    monkeypatch: pytest.MonkeyPatch, patterns: list[str | None], some: set[str]
) -> None:
    monkeypatch.setattr(glob_sets, "_TEXTS", 3)
    monkeypatch.setattr(glob_sets, "_MOST_STATES", 8)
    monkeypatch.setattr(glob_sets, "_WORK", 2)
    glob_sets._automaton.cache_clear()
    check(patterns, some)
    glob_sets._automaton.cache_clear()


def test_many_classes_and_places_are_divided_among_automata() -> None:
    patterns = [chr(0x4E00 + number) + "*" + chr(0x5E00 + number) for number in range(300)]
    patterns += ["*a" * 400 + str(number) for number in range(30)] + ["*".join(map(chr, range(0x3000, 0x3200)))]
    some = {each.replace("*", "") for each in patterns} | {f"{first}{last}" for first in patterns for last in "ab"}
    check(patterns, some)


def test_searches_may_take_turns() -> None:
    """They share states, and each makes the other forget its own."""
    patterns = ["*a*b*", "?a?b*", "[!a]*b"]
    both = [{f"{'ab' * length}{mark}{length}" for length in range(300)} for mark in "ab"]
    shared = GlobSet(patterns)
    searches = [shared.of_all(some) for some in both]
    found: list[dict[str, int] | None] = [None, None]
    while None in found:
        for number, search in enumerate(searches):
            if found[number] is None:
                try:
                    next(search)
                except StopIteration as end:
                    found[number] = end.value
        for group in shared._groups:
            glob_sets._automaton(group, get_ident())._forget()
    assert found == [{text: expected(patterns, text) for text in some} for some in both]


def test_long_texts_are_taken_in_steps() -> None:
    """What a step takes is not to be seen, but how many there are."""
    search = GlobSet(["*a*b", "b*a"] * 200).of_all({"ab" * length for length in (3000, 3001, 3002)})
    assert sum(1 for _ in search) >= 6000 // glob_sets._WORK


def test_texts_that_make_many_states_are_taken_in_steps() -> None:
    some = {f"{number * 0x9E3779B1 & 0xFFFFFFFF:08x}" * 2 for number in range(1000)}
    remembering = ["?" * place + digit + "*" for place in range(8) for digit in "01234567"]
    # one that fills the table for a character of a thousand texts is the longest
    assert sum(1 for _ in GlobSet(remembering).of_all(some)) > 8
