"""A subscription's bounded log of events.

Events stay after they were delivered, until newer ones need their room, so that a client that lost its connection can
go on from a sequence number. What makes room before it was ever delivered is lost, and counted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stapsdtd.events.columns import U64, Block, joined

_ROWS_PER_ENTRY = 16384
_BYTES_PER_ENTRY = 2 << 20  # gRPC's default limit for a message is 4 MiB
_JOINED_PART = 16  # of the room, at most, for what is joined to one entry
ENTRY_OVERHEAD = 2048
"""Bytes of the arrays' own headers, which outweigh an entry of one event."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """A block with the sequence numbers of its events, which rise."""

    seq: U64
    block: Block


@dataclass(frozen=True, slots=True)
class Entry:
    """count events from first_seq on, without gaps, spread over blocks by layout."""

    first_seq: int
    count: int
    nbytes: int
    blocks: tuple[Numbered, ...]
    end_bytes: int = 0
    """Of all entries until here, since the log began."""

    @property
    def next_seq(self) -> int:
        return self.first_seq + self.count

    def starting_at(self, seq: int) -> Entry:
        """Drop what is before seq."""
        if seq <= self.first_seq:
            return self
        blocks = tuple(
            Numbered(numbered.seq[rows], numbered.block.take(rows))
            for numbered in self.blocks
            if len(rows := np.flatnonzero(numbered.seq >= seq))
        )
        return Entry(seq, self.next_seq - seq, self.nbytes, blocks, self.end_bytes)

    def followed_by(self, later: Entry) -> Entry:
        """One entry of both, whose blocks of the same layout are one."""
        by_layout: dict[tuple[str, ...], list[Numbered]] = {}
        for numbered in (*self.blocks, *later.blocks):
            by_layout.setdefault(numbered.block.layout, []).append(numbered)
        blocks = tuple(
            Numbered(np.concatenate([each.seq for each in group]), joined([each.block for each in group]))
            for group in by_layout.values()
        )
        nbytes = self.nbytes + later.nbytes - ENTRY_OVERHEAD
        return Entry(self.first_seq, self.count + later.count, nbytes, blocks)


@dataclass(frozen=True, slots=True)
class LogCounts:
    """received = delivered + lost + pending."""

    received: int
    delivered: int
    lost: int
    pending: int


class Positions(NamedTuple):
    """How many bytes, of all that ever came in, were handed out or made room; and how many came in."""

    read: int
    end: int


class SeqRanges:
    """A set of sequence numbers that come in long runs."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []
        self.count = 0

    def add(self, first: int, end: int) -> int:
        """Add the numbers from first to before end; return how many are new."""
        if end <= first:
            return 0
        before = self.count
        touching = [run for run in self._runs if run[0] <= end and first <= run[1]]
        joined = (min([first, *(run[0] for run in touching)]), max([end, *(run[1] for run in touching)]))
        self._replace(touching, [joined])
        return self.count - before

    def remove(self, first: int, end: int) -> int:
        """Take the numbers from first to before end out; return how many there were."""
        before = self.count
        touched = [run for run in self._runs if run[0] < end and first < run[1]]
        rest = [(run[0], first) for run in touched if run[0] < first] + [
            (end, run[1]) for run in touched if end < run[1]
        ]
        self._replace(touched, rest)
        return before - self.count

    def _replace(self, old: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
        if old or new:
            self._runs = sorted([run for run in self._runs if run not in old] + new)
            self.count += sum(end - first for first, end in new) - sum(end - first for first, end in old)


class EventLog:
    """Written by the engine's reader thread, read by the API's.

    notify is called, in the writer's thread, after each append.
    """

    def __init__(self, max_bytes: int, notify: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._notify = notify
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._bytes = 0
        self._end_bytes = 0
        self._read_bytes = 0
        self._next_seq = 1
        self._handed_to = 1
        self._delivered = 0
        self._read_to = 1
        self._lost = SeqRanges()

    def append(self, blocks: Sequence[Block], *, is_short: bool = False) -> None:
        """Number events of one stretch of time across blocks, each of which is in the order of time: all of them, or
        where it raises, none.

        is_short: room is, so that a few events join the entry before, if nobody has read that.
        """
        # only this thread makes entries, so that what may fail can be done before anything is changed
        entries: list[Entry] = []
        next_seq = self._next_seq
        for part in _parts(blocks):
            entries.append(_numbered(part, next_seq))
            next_seq = entries[-1].next_seq
        with self._lock:
            if is_short and entries:
                entries[0] = self._joined(entries[0])
            for entry in entries:
                self._add(entry)
        self._notify()

    def _joined(self, entry: Entry) -> Entry:
        """Return it with the events of the entry before, where nobody has read that and there is room."""
        last = self._last_unread()
        joins = last is not None and last.nbytes + entry.nbytes - ENTRY_OVERHEAD <= self._max_bytes // _JOINED_PART
        return last.followed_by(entry) if last is not None and joins else entry

    def _add(self, entry: Entry) -> None:
        old = self._entries.get(entry.first_seq)
        nbytes = entry.nbytes - (old.nbytes if old else 0)
        self._bytes += nbytes
        self._end_bytes += nbytes
        self._entries[entry.first_seq] = replace(entry, end_bytes=self._end_bytes)
        self._next_seq = entry.next_seq
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self._evict()

    def _last_unread(self) -> Entry | None:
        last = self._entries[next(reversed(self._entries))] if self._entries else None
        return last if last and last.first_seq >= self._read_to else None

    def _evict(self) -> None:
        _, oldest = self._entries.popitem(last=False)
        self._bytes -= oldest.nbytes
        self._read_bytes = max(self._read_bytes, oldest.end_bytes)
        unseen = oldest.next_seq - max(oldest.first_seq, self._handed_to)
        if unseen > 0:
            self._lost.add(oldest.next_seq - unseen, oldest.next_seq)
            self._handed_to = oldest.next_seq

    def resume(self, seq: int) -> None:
        """A client named the first number that it lacks.

        So what was sent before it has arrived, and what was sent from it on and is no longer kept is lost after all.
        """
        with self._lock:
            seq = min(seq, self._read_to)
            self._count_delivered(self._handed_to, seq)
            first_kept = next(iter(self._entries), self._next_seq)
            self._delivered -= self._lost.add(seq, min(first_kept, self._handed_to))

    def read(self, seq: int | None) -> Entry | None:
        """Return an entry that begins at seq, or None where there is none yet.

        What is no longer kept is passed over, and seq None is the first that was not handed out yet, as is any beyond
        it.
        """
        with self._lock:
            seq = self._handed_to if seq is None else min(seq, self._handed_to)
            if seq >= self._next_seq:
                return None
            entry = self._entries.get(seq)
            if entry is None:
                entry = next(entry for entry in self._entries.values() if entry.next_seq > seq)
            self._read_to = max(self._read_to, entry.next_seq)
        return entry.starting_at(seq)

    def handed_out(self, entry: Entry, next_seq: int) -> None:
        """Count an entry up to a number as delivered, also where it made room while it was being sent."""
        with self._lock:
            self._delivered += self._lost.remove(entry.first_seq, next_seq)
            self._count_delivered(max(entry.first_seq, self._handed_to), next_seq)
            if next_seq == entry.next_seq:
                self._read_bytes = max(self._read_bytes, entry.end_bytes)

    def forget(self) -> None:
        """Keep no events any more, since nobody will read them. The figures stay."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _count_delivered(self, first_seq: int, next_seq: int) -> None:
        if next_seq > first_seq:
            self._delivered += next_seq - first_seq
            self._handed_to = next_seq

    @property
    def next_seq(self) -> int:
        """The number of the next event to come."""
        with self._lock:
            return self._next_seq

    @property
    def first_kept(self) -> int:
        """The number of the first event that can still be read."""
        with self._lock:
            return next(iter(self._entries), self._next_seq)

    @property
    def unread_bytes(self) -> int:
        """What waits to be handed out for the first time."""
        positions = self.positions()
        return positions.end - positions.read

    @property
    def kept_bytes(self) -> int:
        """What it holds, delivered or not."""
        with self._lock:
            return self._bytes

    def positions(self) -> Positions:
        with self._lock:
            return Positions(self._read_bytes, self._end_bytes)

    def counts(self) -> LogCounts:
        with self._lock:
            received = self._next_seq - 1
            lost = self._lost.count
            return LogCounts(received, self._delivered, lost, received - self._delivered - lost)


def _numbered(blocks: Sequence[Block], first_seq: int) -> Entry:
    """Number events in the order of time, from first_seq on."""
    count = sum(map(len, blocks))
    numbers = np.arange(first_seq, first_seq + count, dtype=np.uint64)
    if len(blocks) > 1:
        order = np.argsort(np.concatenate([block.time_ns for block in blocks]), kind="stable")
        numbers[order] = numbers.copy()
    ends = np.cumsum([len(block) for block in blocks]).tolist()
    numbered = tuple(Numbered(numbers[end - len(block) : end], block) for block, end in zip(blocks, ends, strict=True))
    return Entry(first_seq, count, ENTRY_OVERHEAD + rows_bytes(blocks), numbered)


def rows_bytes(blocks: Sequence[Block]) -> int:
    """What events take of the room with their numbers, the overhead of an entry besides."""
    return sum(8 * len(block) + block.nbytes for block in blocks)


def _parts(blocks: Sequence[Block]) -> list[Sequence[Block]]:
    """Cut large batches at moments of time, so that no entry outgrows a message."""
    count = sum(map(len, blocks))
    if count <= _ROWS_PER_ENTRY and sum(block.nbytes for block in blocks) <= _BYTES_PER_ENTRY:
        return [blocks] if count else []
    times = np.concatenate([block.time_ns for block in blocks])
    order = np.argsort(times, kind="stable")
    bytes_before = np.cumsum(np.concatenate([block.row_bytes() for block in blocks])[order])
    portions = np.maximum(bytes_before // _BYTES_PER_ENTRY, np.arange(count) // _ROWS_PER_ENTRY)
    cuts = times[order][1:][np.diff(portions) > 0]
    parts: list[Sequence[Block]] = []
    begins = [0] * len(blocks)
    for cut in [*np.unique(cuts).tolist(), None]:
        part = []
        for number, block in enumerate(blocks):
            end = len(block) if cut is None else int(np.searchsorted(block.time_ns, cut, "left"))
            if end > begins[number]:
                part.append(block.slice(begins[number], end))
                begins[number] = end
        if part:
            parts.append(part)
    return parts
