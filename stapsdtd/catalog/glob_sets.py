"""Match several globs on many texts, mostly without the interpreter's lock.

    globs     a*b and a?
    places    0 a 1* b 2 and 3 a 4 ? 5      an asterisk holds the place before it
    states    {0, 3} -a-> {1, 4} -b-> {1, 2, 5}      the places that texts with the same beginning reach

A state is a number with a bit for each place. It is made when a text first leads there, and a table keeps where each
character leads from it, as in RE2. So numpy takes the next character of a thousand texts in a few passes, however many
globs there are. Clients and programs choose globs and texts, so there may be many states: each character of a text
makes one at most, which takes microseconds, and too many are forgotten. Characters count as one if no glob tells them
apart.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from functools import lru_cache
from threading import get_ident

import numpy as np

from stapsdtd.events.columns import I32, Indices
from stapsdtd.globs import CharacterSet, Glob, pieces_of

_FEW_MATCHES = 512
"""Texts times globs that are matched one by one, which is faster than to make states for them."""
_TEXTS = 1024
"""That are taken at once."""
_WORK = 256
"""Passes over texts, and cells of the table that are filled, in a step: some 2 ms."""
_MOST_STATES = 4 * _TEXTS
_MOST_CLASSES = 256
"""Of characters, in one automaton that has several globs."""
_CODE_POINTS = 0x110000
_UNKNOWN = 0


class GlobSet:
    """Globs, of which each text matches some: a number with bit i for the i-th.

    An empty glob matches all texts, None matches none.
    """

    def __init__(self, globs: Sequence[str | None]) -> None:
        self._always = 0
        self._literals: dict[str, int] = {}
        self._globs: list[tuple[int, str, Glob[str]]] = []
        self._groups: list[tuple[_Places, ...]] = []
        for number, text in enumerate(globs):
            if text is None:
                continue
            glob = Glob(text)
            if not text.strip("*"):
                self._always |= 1 << number
            elif glob.is_literal:
                self._literals[text] = self._literals.get(text, 0) | 1 << number
            else:
                self._globs.append((number, text, glob))

    @property
    def effort(self) -> int:
        """How many globs there are for which a text is not just looked up."""
        return len(self._globs)

    def of(self, text: str) -> int:
        """Match one text."""
        matched = self._always | self._literals.get(text, 0)
        for number, _, glob in self._globs:
            if glob.matches(text):
                matched |= 1 << number
        return matched

    def of_all(self, texts: Collection[str]) -> Generator[None, None, dict[str, int]]:
        """Match texts in steps."""
        if len(texts) * len(self._globs) <= _FEW_MATCHES:
            return {text: self.of(text) for text in texts}
        if not self._groups:
            self._groups = yield from self._grouped()
        matched = {text: self._always | self._literals.get(text, 0) for text in texts}
        ordered = sorted(matched, key=len, reverse=True)
        for first in range(0, len(ordered), _TEXTS):
            some = _Texts(ordered[first : first + _TEXTS])
            for group in self._groups:
                found = yield from _automaton(group, get_ident()).matching(some)
                for text, numbers in zip(some.texts, found, strict=True):
                    matched[text] |= numbers
                yield
        return matched

    def _grouped(self) -> Generator[None, None, list[tuple[_Places, ...]]]:
        """Divide the globs among automata."""
        groups: list[list[_Places]] = []
        bounds: set[int] = set()
        for number, text, _ in self._globs:
            places = _Places(number, text)
            bounds |= places.bounds
            if not groups or len(bounds) > _MOST_CLASSES:
                groups.append([])
                bounds = set(places.bounds)
            groups[-1].append(places)
            yield
        return [tuple(group) for group in groups]


class _Places:
    """A glob's places: the first is 0, and one is behind each character that a text must have.

    before: the places before characters of a set. loops: those that asterisks hold. bounds: where ranges of characters
    begin, and behind their ends.
    """

    def __init__(self, number: int, glob: str) -> None:
        self.number = number
        self.before: dict[CharacterSet, list[int]] = {}
        self.loops: list[int] = []
        self.end = 0
        for position, piece in enumerate(pieces_of(glob)):
            if position:
                self.loops.append(self.end)
            for characters in piece:
                self.before.setdefault(characters, []).append(self.end)
                self.end += 1
        self.bounds = {bound for each in self.before for first, last in each.ranges for bound in (first, last + 1)}


class _Texts:
    """Texts, the longest first. codes: those of all characters. begins: where each text's are. counts: how many texts
    have a character at each position.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        lengths = np.array([len(text) for text in texts])
        self.begins = np.cumsum(lengths) - lengths
        self.counts = (len(texts) - np.cumsum(np.bincount(lengths)))[:-1].tolist()


@lru_cache(maxsize=4)
def _automaton(globs: tuple[_Places, ...], thread: int) -> _Automaton:  # noqa: ARG001 - each thread has its own
    return _Automaton(globs)


class _Automaton:
    """Globs, one behind the other, and the states that texts led to. Used by one thread."""

    def __init__(self, globs: Sequence[_Places]) -> None:
        self._numbers = [each.number for each in globs]
        starts: list[int] = []
        loops: list[int] = []
        before: dict[CharacterSet, list[int]] = {}
        place = 0
        for each in globs:
            starts.append(place)
            loops += (place + loop for loop in each.loops)
            for characters, places in each.before.items():
                before.setdefault(characters, []).extend(place + own for own in places)
            place += each.end + 1
        self._bytes = (place + 7) // 8
        self._starts, self._loops = self._bits(starts), self._bits(loops)
        self._ends = np.array(starts) + [each.end for each in globs]
        self._classes, self._passed = self._classified(before)
        self._width = len(self._passed)
        self._forget()

    def _bits(self, places: Sequence[int]) -> int:
        bits = np.zeros(self._bytes * 8, np.bool_)
        bits[places] = True
        return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")

    def _classified(self, before: dict[CharacterSet, list[int]]) -> tuple[Indices, list[int]]:
        """Return the class of each code point, and for each class the places that its characters lead on from."""
        bounds = sorted({bound for each in before for first, last in each.ranges for bound in (first, last + 1)} | {0})
        class_at = {bound: number for number, bound in enumerate(bounds)}
        inside = np.zeros((len(bounds) + 1, self._bytes * 8), np.int16)
        negated = np.zeros(self._bytes * 8, np.bool_)
        for characters, places in before.items():
            for first, last in characters.ranges:
                inside[class_at[first], places] += 1
                inside[class_at[last + 1], places] -= 1
            if characters.is_negated:
                negated[places] = True
        np.cumsum(inside, axis=0, out=inside)
        packed = np.packbits((inside[:-1] > 0) ^ negated, axis=1, bitorder="little")
        classes = np.repeat(np.arange(len(bounds)), np.diff([*bounds, _CODE_POINTS]))
        return classes, [int.from_bytes(each.tobytes(), "little") for each in packed]

    def _forget(self) -> None:
        """Forget all states but that of no places, which is 1."""
        self._table = np.zeros((_MOST_STATES, self._width), np.int32)
        self._places_of = [0, 0]
        self._numbers_of = {0: 1}

    def matching(self, texts: _Texts) -> Generator[None, None, list[int]]:
        """Return the numbers of the globs that match each text."""
        classes = self._classes.take(texts.codes)
        states = self._states([self._starts]).repeat(len(texts.texts))
        work = 0
        for position, count in enumerate(texts.counts):
            if work > _WORK:
                states, work = (yield from self._kept(states)), 0
            if len(self._places_of) > _MOST_STATES - count:
                states = self._renewed(states)
            cells = states[:count] * self._width + classes.take(texts.begins[:count] + position)
            following = self._table.take(cells)
            work += 1
            if not following.all():
                unknown = np.unique(cells[following == _UNKNOWN])
                self._make(unknown)
                work += len(unknown)
                following = self._table.take(cells)
            states[:count] = following
        return self._matched(states)

    def _kept(self, states: I32) -> Generator[None, None, I32]:
        """Let others use the automaton, who may make it forget states."""
        numbers, index = np.unique(states, return_inverse=True)
        places = [self._places_of[number] for number in numbers.tolist()]
        yield
        return self._states(places)[index]

    def _renewed(self, states: I32) -> I32:
        """Forget all states but these, which get new numbers."""
        numbers, index = np.unique(states, return_inverse=True)
        places = [self._places_of[number] for number in numbers.tolist()]
        self._forget()
        return self._states(places)[index]

    def _states(self, places: Sequence[int]) -> I32:
        return np.array([self._state(each) for each in places], np.int32)

    def _state(self, places: int) -> int:
        number = self._numbers_of.setdefault(places, len(self._places_of))
        if number == len(self._places_of):
            self._places_of.append(places)
        return number

    def _make(self, cells: Indices) -> None:
        """Find out where a class of characters leads from a state. cells: the state times the width, plus the class."""
        made = []
        for cell in cells.tolist():
            state, class_ = divmod(cell, self._width)
            places = self._places_of[state]
            made.append(self._state((places & self._passed[class_]) << 1 | places & self._loops))
        self._table.put(cells, made)

    def _matched(self, states: I32) -> list[int]:
        numbers, index = np.unique(states, return_inverse=True)
        places = b"".join(self._places_of[number].to_bytes(self._bytes, "little") for number in numbers.tolist())
        by_state = np.frombuffer(places, np.uint8).reshape(len(numbers), self._bytes)
        ended = by_state[:, self._ends >> 3] >> (self._ends & 7).astype(np.uint8) & 1
        found = np.zeros((len(numbers), self._numbers[-1] + 1), np.bool_)
        found[:, self._numbers] = ended
        matched = [int.from_bytes(row.tobytes(), "little") for row in np.packbits(found, axis=1, bitorder="little")]
        return [matched[each] for each in index.tolist()]
