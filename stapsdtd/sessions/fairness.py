"""Which events are kept if not all can be: every process gets as much as the busiest ones have to share."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import I32, I64, Indices


def shared_out(batch: EventBatch, room: int) -> EventBatch:
    """Keep about room events, the earliest of each process.

    Processes with few events leave the rest of their share to others, so that a flood costs only whoever causes it.
    """
    if len(batch) <= room:
        return batch
    _, process_of, counts = _by_process(batch)
    return _earliest(batch, process_of, counts, np.full(len(counts), _share(counts, room)))


class Admission:
    """Shares out the last part of a bounded queue by dynamic thresholds (Choudhury and Hahne, 1998): each process may
    hold as many events there as stay free, so that there is always room for one that had none yet.

    Only events count that came in while the queue was short of room and were not read yet. Positions are in bytes.
    """

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        self._admitted: deque[tuple[int, Counter[int]]] = deque()

    def admit(self, batch: EventBatch, free: int, at_least: int) -> EventBatch:
        """Keep the earliest of each process's events. free: how many more fit. at_least: what each may always hold."""
        pids, process_of, counts = _by_process(batch)
        held = np.array([self._held[pid] for pid in pids.tolist()], np.int64)
        threshold = max(_threshold(held, counts, free), at_least)
        return _earliest(batch, process_of, counts, np.maximum(threshold - held, 0))

    def admitted(self, batch: EventBatch, end_position: int) -> None:
        """Count events that are now in the queue, before end_position."""
        pids, _, counts = _by_process(batch)
        by_pid = Counter(dict(zip(pids.tolist(), counts.tolist(), strict=True)))
        self._held.update(by_pid)
        self._admitted.append((end_position, by_pid))

    def read(self, position: int) -> None:
        """Forget events before position."""
        while self._admitted and self._admitted[0][0] <= position:
            self._held -= self._admitted.popleft()[1]


def _by_process(batch: EventBatch) -> tuple[I32, Indices, Indices]:
    """Return the distinct pids, each event's index among them, and how many events each pid has."""
    return np.unique(batch.pid, return_inverse=True, return_counts=True)


def _threshold(held: I64, counts: Indices, free: int) -> int:
    """Return the largest number of events that each process may hold with as many left free."""
    fits, exceeds = 0, free + 1
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        taken = int(np.clip(middle - held, 0, counts).sum())
        fits, exceeds = (middle, exceeds) if taken + middle <= free else (fits, middle)
    return fits


def _earliest(batch: EventBatch, process_of: Indices, counts: Indices, limits: I64) -> EventBatch:
    """Keep as many of each process's events as its limit allows."""
    order = np.argsort(process_of, kind="stable")
    starts = np.cumsum(counts) - counts
    ranks = np.empty(len(batch), np.int64)
    ranks[order] = np.arange(len(batch)) - np.repeat(starts, counts)
    kept = np.flatnonzero(ranks < limits[process_of])
    return batch if len(kept) == len(batch) else batch.take(kept)


def _share(counts: Indices, room: int) -> int:
    """Return the largest number of events that each process may have with no more than room in total."""
    rising = np.sort(counts)
    before = np.concatenate([[0], np.cumsum(rising)[:-1]])
    sharing = np.arange(len(rising), 0, -1)
    # if the processes from here on share equally what those before did not use
    shares = np.maximum(room - before, 0) // sharing
    fits = np.flatnonzero(shares < rising)
    return int(shares[fits[0]]) if len(fits) else int(rising[-1])
