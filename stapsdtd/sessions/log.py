"""A subscription's bounded log of events.

Events stay after they were delivered, until newer ones need their room, so that a client that lost its connection can
resume at a sequence number. Events that are discarded before they were ever delivered are counted as lost.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stapsdtd.events.batch import EventBatch, join
from stapsdtd.sessions.seq_ranges import SeqRanges

_ROWS_PER_ENTRY = 16384
_BYTES_PER_ENTRY = 2 << 20  # gRPC's default limit for a message is 4 MiB
_JOINED_PART, _MOST_JOINED_BYTES = 16, 1 << 16
"""Small batches are joined to an entry as long as it takes no more than this part of the room, nor so many bytes: each
copies what is there.
"""
ENTRY_OVERHEAD = 2048
"""Bytes of the arrays' own headers, which outweigh an entry of one event."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Events in the order of their sequence numbers, which are first_seq, first_seq + 1, ….

    end_bytes: the size of all entries of the log so far, including this one and those discarded.
    """

    first_seq: int
    batch: EventBatch
    nbytes: int
    end_bytes: int = 0

    @property
    def next_seq(self) -> int:
        return self.first_seq + len(self.batch)

    def starting_at(self, seq: int) -> Entry:
        """Leave out the events before seq."""
        if seq <= self.first_seq:
            return self
        return self.part(seq - self.first_seq, len(self.batch))

    def part(self, begin: int, end: int) -> Entry:
        """Return consecutive events, by their positions."""
        if end - begin == len(self.batch):
            return self
        return replace(self, first_seq=self.first_seq + begin, batch=self.batch.slice(begin, end))

    def followed_by(self, later: Entry) -> Entry:
        return Entry(self.first_seq, join([self.batch, later.batch]), self.nbytes + later.nbytes - ENTRY_OVERHEAD)


@dataclass(frozen=True, slots=True)
class LogCounts:
    """received = delivered + lost + pending."""

    received: int
    delivered: int
    lost: int
    pending: int


class EventLog:
    """Written by the engine's reader thread and read by the API's. notify is called by the writer after each append."""

    def __init__(self, max_bytes: int, notify: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
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

    def append(self, batch: EventBatch, *, is_short: bool = False) -> None:
        """Number events, which are in the order of time. If it raises, none of them was added.

        is_short: room is scarce, so a small batch is joined to the last entry if no stream has read that.
        """
        # only this thread makes entries, so whatever may fail is done before anything is changed
        entries: list[Entry] = []
        next_seq = self._next_seq
        for part, nbytes in _parts(batch):
            entries.append(Entry(next_seq, part, ENTRY_OVERHEAD + nbytes))
            next_seq += len(part)
        with self._lock:
            if is_short and entries:
                entries[0] = self._joined(entries[0])
            for entry in entries:
                self._add(entry)
        self._notify()

    def _joined(self, entry: Entry) -> Entry:
        """Return the entry with the events of the last one, if no stream has read that and there is room."""
        last = self._last_unread()
        most = min(self.max_bytes // _JOINED_PART, _MOST_JOINED_BYTES)
        joins = last is not None and last.nbytes + entry.nbytes - ENTRY_OVERHEAD <= most
        return last.followed_by(entry) if last is not None and joins else entry

    def _add(self, entry: Entry) -> None:
        old = self._entries.get(entry.first_seq)
        nbytes = entry.nbytes - (old.nbytes if old else 0)
        self._bytes += nbytes
        self._end_bytes += nbytes
        self._entries[entry.first_seq] = Entry(entry.first_seq, entry.batch, entry.nbytes, self._end_bytes)
        self._next_seq = entry.next_seq
        while self._bytes > self.max_bytes and len(self._entries) > 1:
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

    def discard(self) -> None:
        """Keep nothing. What was never handed out is lost."""
        with self._lock:
            while self._entries:
                self._evict()

    def resume(self, seq: int) -> None:
        """Resume at the first number that a client lacks.

        Events before it have arrived. Events from it on that were sent and are no longer kept are lost after all.
        """
        with self._lock:
            seq = min(seq, self._read_to)
            self._count_delivered(self._handed_to, seq)
            first_kept = next(iter(self._entries), self._next_seq)
            self._delivered -= self._lost.add(seq, min(first_kept, self._handed_to))

    def read(self, seq: int | None) -> Entry | None:
        """Return an entry that begins at seq, or None if there is none yet.

        Numbers that are no longer kept are skipped. None, or a number beyond those handed out, is the first one that
        was not handed out yet.
        """
        with self._lock:
            seq = self._handed_to if seq is None else min(seq, self._handed_to)
            if seq >= self._next_seq:
                return None
            entry = self._entries.get(seq)
            if entry is None:
                # all that it had may be discarded
                if not self._entries:
                    return None
                # each begins where the one before ends; there may be 100,000
                first_seqs = list(self._entries)
                entry = self._entries[first_seqs[max(bisect_right(first_seqs, seq) - 1, 0)]]
            self._read_to = max(self._read_to, entry.next_seq)
        return entry.starting_at(seq)

    def handed_out(self, entry: Entry, next_seq: int) -> None:
        """Count an entry up to next_seq as delivered, even if it was discarded while it was being sent."""
        with self._lock:
            self._delivered += self._lost.remove(entry.first_seq, next_seq)
            self._count_delivered(max(entry.first_seq, self._handed_to), next_seq)
            if next_seq == entry.next_seq:
                self._read_bytes = max(self._read_bytes, entry.end_bytes)

    def _count_delivered(self, first_seq: int, next_seq: int) -> None:
        if next_seq > first_seq:
            self._delivered += next_seq - first_seq
            self._handed_to = next_seq

    @property
    def next_seq(self) -> int:
        """The number that the next event will have."""
        with self._lock:
            return self._next_seq

    @property
    def first_kept(self) -> int:
        """The number of the first event that can still be read."""
        with self._lock:
            return next(iter(self._entries), self._next_seq)

    @property
    def unread_bytes(self) -> int:
        """The size of what was never handed out."""
        with self._lock:
            return self._end_bytes - self._read_bytes

    @property
    def read_bytes(self) -> int:
        """The size of all entries that were handed out or discarded; see `Entry.end_bytes`."""
        with self._lock:
            return self._read_bytes

    @property
    def end_bytes(self) -> int:
        """The size of all entries so far."""
        with self._lock:
            return self._end_bytes

    @property
    def kept_bytes(self) -> int:
        """The size of all events that are kept, delivered or not."""
        with self._lock:
            return self._bytes

    def counts(self) -> LogCounts:
        with self._lock:
            received = self._next_seq - 1
            lost = self._lost.count
            return LogCounts(received, self._delivered, lost, received - self._delivered - lost)


def _parts(batch: EventBatch) -> list[tuple[EventBatch, int]]:
    """Split a large batch, so that no entry exceeds the size of a message. Return each part with its size in bytes."""
    count, nbytes = len(batch), batch.nbytes
    if count <= _ROWS_PER_ENTRY and nbytes <= _BYTES_PER_ENTRY:
        return [(batch, nbytes)] if count else []
    part_of = np.maximum(np.cumsum(batch.row_bytes()) // _BYTES_PER_ENTRY, np.arange(count) // _ROWS_PER_ENTRY)
    cuts = (np.flatnonzero(np.diff(part_of)) + 1).tolist()
    parts = [batch.slice(begin, end) for begin, end in pairwise([0, *cuts, count])]
    return [(part, part.nbytes) for part in parts]
