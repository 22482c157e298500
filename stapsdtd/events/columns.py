"""Events in columns: the form in which they travel from the engine to the API."""

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


_NUMBERS = {"i": "signed", "u": "unsigned", "f": "float"}


def floats(bits: U64, size: int) -> F64:
    """Read IEEE 754's numbers of 4 or 8 bytes, which are the lowest of 64 bits each."""
    if size == 8:
        return bits.view(np.float64)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One number an event, int64, uint64 or float64. unavailable is None where every event has its value."""

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
    """One string an event, without its NUL: event i's is data[ends[i-1]:ends[i]].

    is_raw: it is a value's bytes as they were in memory, and no text.
    """

    ends: U32
    data: bytes
    unavailable: Bools | None = None
    is_raw: bool = False

    @property
    def layout(self) -> str:
        return "bytes" if self.is_raw else "string"

    @classmethod
    def of(cls, strings: Sequence[bytes | None]) -> Strings:
        """Build from one bytes an event, None where there is none."""
        lengths = np.fromiter((len(string) if string else 0 for string in strings), np.uint32, len(strings))
        missing = np.fromiter((string is None for string in strings), np.bool_, len(strings))
        return cls(
            np.cumsum(lengths, dtype=np.uint32),
            b"".join(string for string in strings if string),
            missing if missing.any() else None,
        )

    @property
    def nbytes(self) -> int:
        return self.ends.nbytes + len(self.data)

    def row_bytes(self) -> Indices:
        lengths = self.ends.astype(np.intp)
        lengths[1:] -= lengths[:-1].copy()
        return lengths + self.ends.itemsize

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


ValueColumn = Numbers | Strings


@dataclass(frozen=True, slots=True)
class Block:
    """Events whose values have the same types, in order of time.

    time_ns is CLOCK_MONOTONIC at the hit; pid and tid are of the daemon's pid namespace; comm is NUL-padded.
    """

    time_ns: I64
    pid: I32
    tid: I32
    cpu: U16
    comm: Comms
    site_id: U32
    values: tuple[ValueColumn, ...]

    def __len__(self) -> int:
        return len(self.time_ns)

    def site_ids(self) -> list[int]:
        """Name each site that fired once; most often it is one for all events."""
        if len(self) and (self.site_id == self.site_id[0]).all():
            return [int(self.site_id[0])]
        found: list[int] = np.unique(self.site_id).tolist()
        return found

    @property
    def nbytes(self) -> int:
        """Memory that the columns take, about."""
        head = self.time_ns, self.pid, self.tid, self.cpu, self.comm, self.site_id
        return sum(column.nbytes for column in head) + sum(column.nbytes for column in self.values)

    def row_bytes(self) -> Indices:
        """What each event takes of nbytes."""
        head = self.time_ns, self.pid, self.tid, self.cpu, self.comm, self.site_id
        fixed = np.full(len(self), sum(column.itemsize for column in head), np.intp)
        return sum((column.row_bytes() for column in self.values), fixed)

    @property
    def layout(self) -> tuple[str, ...]:
        return tuple(column.layout for column in self.values)

    def slice(self, begin: int, end: int) -> Block:
        """Return some events in a row; numbers share the memory of this block."""
        return Block(
            self.time_ns[begin:end], self.pid[begin:end], self.tid[begin:end], self.cpu[begin:end],
            self.comm[begin:end], self.site_id[begin:end], tuple(column.slice(begin, end) for column in self.values),
        )  # fmt: skip

    def take(self, rows: Indices) -> Block:
        return Block(
            self.time_ns[rows], self.pid[rows], self.tid[rows], self.cpu[rows], self.comm[rows], self.site_id[rows],
            tuple(column.take(rows) for column in self.values),
        )  # fmt: skip


def merge(blocks: Sequence[Block]) -> list[Block]:
    """Join blocks of the same layout, and bring each result into the order of time."""
    by_layout: dict[tuple[str, ...], list[Block]] = {}
    for block in blocks:
        by_layout.setdefault(block.layout, []).append(block)
    return [_sorted(group[0] if len(group) == 1 else joined(group)) for group in by_layout.values()]


def _sorted(block: Block) -> Block:
    if np.all(block.time_ns[:-1] <= block.time_ns[1:]):
        return block
    return block.take(np.argsort(block.time_ns, kind="stable"))


def joined(blocks: Sequence[Block]) -> Block:
    """Blocks of the same layout, one after the other."""
    return Block(
        np.concatenate([block.time_ns for block in blocks]),
        np.concatenate([block.pid for block in blocks]),
        np.concatenate([block.tid for block in blocks]),
        np.concatenate([block.cpu for block in blocks]),
        np.concatenate([block.comm for block in blocks]),
        np.concatenate([block.site_id for block in blocks]),
        tuple(_joined_column(columns) for columns in zip(*(block.values for block in blocks), strict=True)),
    )


def _joined_column(columns: Sequence[ValueColumn]) -> ValueColumn:
    numbers = [column for column in columns if isinstance(column, Numbers)]
    if numbers:
        missing = _joined_missing([(column.unavailable, len(column.data)) for column in numbers])
        return Numbers(np.concatenate([column.data for column in numbers]), missing)
    strings = [column for column in columns if isinstance(column, Strings)]
    starts = np.cumsum([0, *(len(column.data) for column in strings[:-1])], dtype=np.uint32)
    return Strings(
        np.concatenate([column.ends + start for column, start in zip(strings, starts, strict=True)]),
        b"".join(column.data for column in strings),
        _joined_missing([(column.unavailable, len(column.ends)) for column in strings]),
        strings[0].is_raw,
    )


def _joined_missing(parts: Sequence[tuple[Bools | None, int]]) -> Bools | None:
    if all(missing is None for missing, _ in parts):
        return None
    return np.concatenate([np.zeros(count, np.bool_) if missing is None else missing for missing, count in parts])
