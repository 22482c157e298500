"""Match globs without backtracking: what a match costs is bounded, whatever the pattern and the text.

    query__*       begins with query__
    *[a-c]?        has a, b or c before its last character
    [!_]*          does not begin with _, and is not empty

`*` stands for any characters, newlines among them, `?` for one, and a set in brackets for one of it. A `[` that is not
closed is itself. Texts are bytes or strings; case matters.

Short patterns and texts are left to the standard library's expression. Its pieces between asterisks have fixed lengths
and are atomic groups (`fnmatch.translate`), so each character of the text costs at most a step for each one of the
pattern. For others a number keeps, in bit i, whether the pattern up to here matches the first i characters. This is the
automaton of Baeza-Yates and Gonnet (1992), with a bit for each place of the text rather than of the pattern. Then a
character of the pattern costs one step for 64 characters of the text, and many texts can be put side by side into one
number, see `query/matched_texts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import AnyStr, Generic, Protocol

_ASTERISK, _QUESTION_MARK, _OPENING, _CLOSING, _EXCLAMATION_MARK, _HYPHEN = map(ord, "*?[]!-")

_SPECIAL = re.compile(r"[*?[]")

_SHORT_PATTERN = 256
_SHORT_MATCH = 1 << 14
"""Characters of the pattern times characters of the text: some 20 us at most."""


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """Bytes or code points, from the first to the last of each range."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False

    def __contains__(self, character: int) -> bool:
        return any(first <= character <= last for first, last in self.ranges) is not self.is_negated


_ANY = CharacterSet((), is_negated=True)

Piece = tuple[CharacterSet, ...]


class Places(Protocol):
    """The places before, between and behind the characters of texts, as bits of numbers.

    A text of n characters has n + 1 places and a bit that guards it from the next text. starts, ends, guards: the first
    and last places of all texts, and the bits behind them.
    """

    starts: int
    ends: int
    guards: int

    def before(self, characters: CharacterSet) -> int:
        """Return the places before characters of a set."""


def reached_ends(pieces: Sequence[Piece], places: Places) -> int:
    """Return the ends of the texts that match."""
    reached, guards = places.starts, places.guards
    everywhere = guards - reached
    for number, piece in enumerate(pieces):
        if number:
            # every place from the first one on: that of a text borrows from its guard alone
            reached = (reached | (guards - reached)) & everywhere
        for characters in piece:
            reached = (reached & places.before(characters)) << 1
        if not reached:
            break
    return reached & places.ends


class Glob(Generic[AnyStr]):
    """A pattern. Parsed when it is first needed.

    >>> Glob("query__*").matches("query__start"), Glob(b"[a-c]").matches(b"d")
    (True, False)

    short_text: the length of the texts, in characters, up to which `matches_short` takes them; -1 for none.
    """

    def __init__(self, pattern: AnyStr) -> None:
        self._pattern: AnyStr = pattern
        prefix, suffix = _literal_ends(pattern)
        self._prefix: AnyStr = prefix
        self._suffix: AnyStr = suffix
        self.short_text = _SHORT_MATCH // max(len(pattern), 1) if len(pattern) <= _SHORT_PATTERN else -1

    def matches(self, text: AnyStr) -> bool:
        if not text.startswith(self._prefix) or not text.endswith(self._suffix):
            return False
        if len(text) <= self.short_text:
            return self.matches_short(text) is not None
        return bool(reached_ends(self.pieces, _PlacesOfOne(text)))

    @property
    def is_literal(self) -> bool:
        """Whether it only matches the text that it is itself."""
        return self._prefix == self._pattern

    @cached_property
    def matches_short(self) -> Callable[[AnyStr], object]:
        """Returns None for a short text that does not match."""
        if isinstance(self._pattern, bytes):
            return re.compile(translate(_text(self._pattern)).encode("latin-1")).match
        return re.compile(translate(self._pattern)).match

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What is between the asterisks; all of it if there is none."""
        return pieces_of(self._pattern)


def pieces_of(pattern: str | bytes) -> tuple[Piece, ...]:
    """Return what is between the asterisks of a pattern; all of it if there is none."""
    return tuple(_pieces(_codes(pattern)))


def _literal_ends(pattern: AnyStr) -> tuple[AnyStr, AnyStr]:
    """Return what every text that matches begins and ends with, as far as that is seen at once."""
    text = _text(pattern)
    first = _SPECIAL.search(text)
    if first is None:
        return pattern, pattern
    # what follows a bracket may belong to a set
    end = len(text) if "[" in text else max(text.rfind("*"), text.rfind("?")) + 1
    return pattern[: first.start()], pattern[end:]


@lru_cache(maxsize=256)
def compiled(pattern: AnyStr) -> Glob[AnyStr]:
    return Glob(pattern)


def matches(text: AnyStr, pattern: AnyStr) -> bool:
    """Report whether a text matches a glob."""
    return compiled(pattern).matches(text)


class _PlacesOfOne:
    """The places of one text. Costs one step for each character and for each 64 that the text has."""

    def __init__(self, text: str | bytes) -> None:
        self.starts, self.ends, self.guards = 1, 1 << len(text), 2 << len(text)
        self._by_character: dict[int, int] = {}
        for place, character in enumerate(_codes(text)):
            self._by_character[character] = self._by_character.get(character, 0) | 1 << place
        self._by_set: dict[CharacterSet, int] = {}

    def before(self, characters: CharacterSet) -> int:
        places = self._by_set.get(characters)
        if places is None:
            # the characters are different ones, so their places are, too
            places = sum(places for character, places in self._by_character.items() if character in characters)
            self._by_set[characters] = places
        return places


def _text(pattern: str | bytes) -> str:
    """Return a pattern with a character for each byte or code point."""
    return pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern


def _codes(text: str | bytes) -> Sequence[int]:
    return text if isinstance(text, bytes) else [ord(character) for character in text]


def _pieces(pattern: Sequence[int]) -> Iterator[Piece]:
    piece: list[CharacterSet] = []
    place = 0
    # if one bracket is not closed, those behind it are not, either: looking again would take quadratic time
    is_closed = True
    while place < len(pattern):
        character = pattern[place]
        place += 1
        if character == _ASTERISK:
            yield tuple(piece)
            piece = []
        elif character == _QUESTION_MARK:
            piece.append(_ANY)
        elif character == _OPENING and is_closed and (end := _end_of_set(pattern, place)) is not None:
            piece.append(_set(pattern[place:end]))
            place = end + 1
        else:
            is_closed = is_closed and character != _OPENING
            piece.append(_only(character))
    yield tuple(piece)


@lru_cache(maxsize=1024)
def _only(character: int) -> CharacterSet:
    return CharacterSet(((character, character),))


def _end_of_set(pattern: Sequence[int], place: int) -> int | None:
    """Return where a set is closed; None if it is not. place: behind its opening bracket."""
    if pattern[place : place + 1] and pattern[place] == _EXCLAMATION_MARK:
        place += 1
    with suppress(ValueError):
        # a bracket that comes first is one of the set
        return pattern.index(_CLOSING, place + 1)
    return None


def _set(inside: Sequence[int]) -> CharacterSet:
    is_negated = inside[0] == _EXCLAMATION_MARK
    place, ranges = int(is_negated), []
    while place < len(inside):
        is_range = place + 2 < len(inside) and inside[place + 1] == _HYPHEN
        ranges.append((inside[place], inside[place + 2] if is_range else inside[place]))
        place += 3 if is_range else 1
    return CharacterSet(tuple(each for each in ranges if each[0] <= each[1]), is_negated)
