"""Globs match what fnmatch matches, and cost a bounded number of steps."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import AnyStr

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stapsdtd.globs import CharacterSet, Glob, Places, reached_ends
from stapsdtd.query.matched_texts import matching

_ALPHABET = "ab-z!]^[*?\\\n\0é\udcff"
_LONG = 400
"""Texts of this length, repeated, are matched side by side rather than one by one."""


def _expected(pattern: AnyStr, text: AnyStr) -> bool:
    """The judge: the standard library's backtracking expression."""
    if isinstance(pattern, bytes) and isinstance(text, bytes):
        return re.fullmatch(translate(pattern.decode("latin-1")).encode("latin-1"), text) is not None
    return re.fullmatch(translate(str(pattern)), str(text)) is not None


patterns = st.text(_ALPHABET, max_size=12)
texts = st.text(_ALPHABET, max_size=12)


@settings(max_examples=1000)
@given(patterns, texts)
@example("[!]", "a")
@example("[]]", "]")
@example("[!]a]", "b")
@example("[z-a]", "z")
@example("[!z-a]", "q")
@example("[c-a-b]", "-")
@example("[c-a--z]", "b")
@example("[a-]", "-")
@example("[", "[")
@example("*", "\n")
@example("ab*ba", "aba")
def test_strings_match_as_by_fnmatch(pattern: str, text: str) -> None:
    assert Glob(pattern).matches(text) is _expected(pattern, text)


@settings(max_examples=1000)
@given(
    st.binary(max_size=12) | patterns.map(lambda text: text.encode("latin-1", "replace")),
    st.lists(st.none() | st.binary(max_size=12) | texts.map(lambda text: text.encode(errors="surrogateescape"))),
    st.sampled_from([1, _LONG]),
)
@example(b"*\xff?", [b"\xff", b"a\xffb", None, b""], _LONG)
@example(b"*a?b", [b"ab", b"a.b", b"a", b"b"], _LONG)
def test_bytes_match_as_by_fnmatch_also_side_by_side(pattern: bytes, some: list[bytes | None], repeat: int) -> None:
    column = [text and text * repeat for text in some] + some
    expected = [text is not None and _expected(pattern, text) for text in column]
    assert matching(Glob(pattern), column).tolist() == expected


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_large_columns_are_matched_in_parts(lengths: list[int]) -> None:
    column = [b"a" * length + b"b" for length in lengths] + [b"a" * 300_000]
    assert matching(Glob(b"*[a]b"), column).tolist() == [length > 0 for length in lengths] + [False]


class _CountedPlaces:
    """The places of one text, all of whose characters are `a`."""

    def __init__(self, length: int) -> None:
        self.starts, self.ends, self.guards = 1, 1 << length, 2 << length
        self.steps = 0

    def before(self, characters: CharacterSet) -> int:
        self.steps += 1
        return self.ends - 1 if ord("a") in characters else 0


@pytest.mark.parametrize("pattern", ["*a" * 100 + "*b", "*" + "?" * 245 + "b", "a*" * 120 + "[!a]"])
def test_a_pattern_takes_a_step_a_character_whatever_the_text(pattern: str) -> None:
    places: Places = (counted := _CountedPlaces(4096))
    glob = Glob(pattern)
    assert not reached_ends(glob.pieces, places)
    assert counted.steps == sum(map(len, glob.pieces))


def test_a_pattern_is_read_once_however_many_brackets_are_not_closed() -> None:
    # looking for the end of each would take an hour
    brackets = "[" * (1 << 17)
    assert Glob(brackets + "*").matches(brackets)
    assert not Glob(brackets + "*").matches("]")
