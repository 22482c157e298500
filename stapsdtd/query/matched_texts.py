"""Match a glob on many texts at once.

    texts      ab, a, cab                 joined, with two bytes behind each: the place of its end and its guard
    joined     a b . . a . . c a b . .
    before a   1 0 0 0 1 0 0 0 1 0 0 0    a bit for each byte, one number for all texts

So a character of the pattern costs three passes over an eighth of the texts' bytes, in C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from stapsdtd.events.columns import Bools, Indices
from stapsdtd.globs import CharacterSet, Glob, reached_ends

_MANY_BYTES = 256 << 10
"""The most that are joined, but for a longer text, so that the numbers stay in the processor's cache."""
_BEHIND = b"\0\0"


def matching(glob: Glob[bytes], texts: Sequence[bytes | None]) -> Bools:
    """Return which texts match; None does not. Long ones that are alike are looked at once."""
    matches_short, short_text = glob.matches_short, glob.short_text
    if max(map(len, filter(None, texts)), default=0) <= short_text:
        return np.array([text is not None and matches_short(text) is not None for text in texts], np.bool_)
    known: dict[bytes | None, bool] = dict.fromkeys(texts, False)
    for some in _parts([text for text in known if text is not None]):
        known.update(zip(some, _matching(glob, some), strict=True))
    return np.fromiter(map(known.__getitem__, texts), np.bool_, len(texts))


def _parts(texts: list[bytes]) -> Iterator[list[bytes]]:
    ends = np.cumsum([len(text) + len(_BEHIND) for text in texts])
    part_of = (ends - 1) // _MANY_BYTES
    begins = [0, *(np.flatnonzero(np.diff(part_of)) + 1).tolist(), len(texts)]
    for begin, end in pairwise(begins):
        yield texts[begin:end]


def _matching(glob: Glob[bytes], texts: list[bytes]) -> list[bool]:
    places = _PlacesOfMany(texts)
    matched: list[bool] = places.at_ends(reached_ends(glob.pieces, places)).tolist()
    return matched


@lru_cache(maxsize=1024)
def _table(characters: CharacterSet) -> bytes:
    """Return 1 for each byte of a set, and 0 for others."""
    return bytes(byte in characters for byte in range(256))


class _PlacesOfMany:
    """The places of several texts, each a bit; see `globs.Places`."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._joined = _BEHIND.join(texts) + _BEHIND
        next_starts = np.cumsum([len(text) + len(_BEHIND) for text in texts])
        self._ends = next_starts - 2
        self.starts = self._number(np.concatenate([[0], next_starts[:-1]]))
        self.ends = self._number(self._ends)
        self.guards = self.ends << 1
        self._characters = (self.guards - self.starts) ^ self.ends
        self._by_set: dict[CharacterSet, int] = {}

    def before(self, characters: CharacterSet) -> int:
        places = self._by_set.get(characters)
        if places is None:
            found = np.frombuffer(self._joined.translate(_table(characters)), np.uint8)
            bits = np.packbits(found, bitorder="little")
            places = self._by_set[characters] = int.from_bytes(bits.tobytes(), "little") & self._characters
        return places

    def at_ends(self, places: int) -> Bools:
        """Return which texts' ends are among some places."""
        count = len(self._joined)
        bits = np.frombuffer(places.to_bytes((count + 7) // 8, "little"), np.uint8)
        found: Bools = np.unpackbits(bits, count=count, bitorder="little")[self._ends].astype(np.bool_)
        return found

    def _number(self, places: Indices) -> int:
        bits = np.zeros(len(self._joined), np.uint8)
        bits[places] = 1
        return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
