"""Columns of numbers and of strings: the arrays that an EventBatch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U16 = npt.NDArray[np.uint16]
Bools = npt.NDArray[np.bool_]
Comms = npt.NDArray[np.bytes_]
Indices = npt.NDArray[np.intp]

COMM_BYTES = 16


CUT = b"\0"
"""Behind a string of which there was more. No other string has a NUL."""

_NUMBERS = {"i": "signed", "u": "unsigned", "f": "float"}


def floats(bits: U64, size: int) -> F64:
    """Read IEEE 754 numbers of 4 or 8 bytes from the low bits of each element."""
    if size == 8:
        return bits.view(np.float64)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One number per event: int64, uint64 or float64. unavailable is None if every event has a value."""

    data: I64 | U64 | F64
    unavailable: Bools | None = None

    @property
    def layout(self) -> str:
        return _NUMBERS[self.data.dtype.kind]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def row_bytes(self) -> Indices:
        return np.full(len(self.data), self.data.itemsize, np.intp)

    def slice(self, begin: int, end: int) -> Numbers:
        return Numbers(self.data[begin:end], None if self.unavailable is None else self.unavailable[begin:end])

    def take(self, rows: Indices) -> Numbers:
        return Numbers(self.data[rows], None if self.unavailable is None else self.unavailable[rows])


@dataclass(frozen=True, slots=True)
class Strings:
    """One string per event, without its NUL: event i has data[ends[i-1]:ends[i]]. One that was cut has the mark CUT.

    is_raw: the bytes of a value as they were in memory, not text.
    """

    ends: U32
    data: bytes
    unavailable: Bools | None = None
    is_raw: bool = False

    @property
    def layout(self) -> str:
        return "bytes" if self.is_raw else "string"

    @property
    def cut(self) -> Bools | None:
        """Report which strings were cut; None if none was."""
        if self.is_raw or CUT not in self.data:
            return None
        lengths, ends = self._lengths(), self.ends.astype(np.intp)
        is_nul: Bools = np.frombuffer(self.data, np.uint8)[np.maximum(ends - 1, 0)] == 0
        return is_nul & (lengths > 0)

    def unmarked(self) -> Strings:
        """Return the strings without the marks of those that were cut."""
        return self if self.cut is None else Strings.of([without_mark(each) for each in self.tolist()])

    @classmethod
    def of(cls, strings: Sequence[bytes | None]) -> Strings:
        """Build a column from one byte string per event, None where the value is unavailable."""
        lengths = np.fromiter((len(string) if string else 0 for string in strings), np.uint32, len(strings))
        missing = np.fromiter((string is None for string in strings), np.bool_, len(strings))
        return cls(
            np.cumsum(lengths, dtype=np.uint32),
            b"".join(string for string in strings if string),
            missing if missing.any() else None,
        )

    @classmethod
    def coded(cls, names: Sequence[bytes | None], codes: Indices) -> Strings:
        """Build a column in which event i has names[codes[i]], of few names."""
        texts = [name or b"" for name in names]
        missing = np.array([name is None for name in names], np.bool_)[codes]
        return cls(
            np.cumsum(np.array(list(map(len, texts)), np.uint32)[codes], dtype=np.uint32),
            texts[0] * len(codes) if len(texts) == 1 else b"".join(map(texts.__getitem__, codes.tolist())),
            missing if missing.any() else None,
        )

    @property
    def nbytes(self) -> int:
        return self.ends.nbytes + len(self.data)

    def row_bytes(self) -> Indices:
        return self._lengths() + self.ends.itemsize

    def _lengths(self) -> Indices:
        lengths = self.ends.astype(np.intp)
        lengths[1:] -= lengths[:-1].copy()
        return lengths

    def tolist(self) -> list[bytes | None]:
        ends = self.ends.tolist()
        strings: list[bytes | None] = [self.data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if self.unavailable is not None:
            for row in np.flatnonzero(self.unavailable).tolist():
                strings[row] = None
        return strings

    def slice(self, begin: int, end: int) -> Strings:
        first, last = (int(self.ends[row - 1]) if row else 0 for row in (begin, end))
        return Strings(
            self.ends[begin:end] - np.uint32(first),
            self.data[first:last],
            None if self.unavailable is None else self.unavailable[begin:end],
            self.is_raw,
        )

    def take(self, rows: Indices) -> Strings:
        strings = self.tolist()
        return replace(Strings.of([strings[row] for row in rows.tolist()]), is_raw=self.is_raw)


def shortened(text: bytes, most: int) -> bytes:
    """Return a string with at most so many bytes, and the mark if there were more."""
    return text[:most] + CUT if len(text) > most else text


def without_mark(text: bytes | None) -> bytes | None:
    return text[:-1] if text is not None and text.endswith(CUT) else text


ValueColumn = Numbers | Strings


def concatenate(columns: Sequence[ValueColumn]) -> ValueColumn:
    """Join columns of the same layout."""
    numbers = [column for column in columns if isinstance(column, Numbers)]
    if numbers:
        missing = _concatenate_missing([(column.unavailable, len(column.data)) for column in numbers])
        return Numbers(np.concatenate([column.data for column in numbers]), missing)
    strings = [column for column in columns if isinstance(column, Strings)]
    starts = np.cumsum([0, *(len(column.data) for column in strings[:-1])], dtype=np.uint32)
    return Strings(
        np.concatenate([column.ends + start for column, start in zip(strings, starts, strict=True)]),
        b"".join(column.data for column in strings),
        _concatenate_missing([(column.unavailable, len(column.ends)) for column in strings]),
        strings[0].is_raw,
    )


def _concatenate_missing(parts: Sequence[tuple[Bools | None, int]]) -> Bools | None:
    if all(missing is None for missing, _ in parts):
        return None
    return np.concatenate([np.zeros(count, np.bool_) if missing is None else missing for missing, count in parts])
