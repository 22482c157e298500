"""Which events are kept where not all can be: each process gets as much as the busiest ones have to share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from stapsdtd.events.columns import I32, I64, Block, Indices


def shared_out(blocks: Sequence[Block], room: int) -> list[Block]:
    """Keep about room events, the earliest of each process.

    What a process with few events does not use is for the others, so that one that floods costs none but itself.
    """
    if sum(map(len, blocks)) <= room:
        return list(blocks)
    _, whose, counts = _by_process(blocks)
    return _earliest(blocks, whose, counts, np.full(len(counts), _share(counts, room)))


class Admission:
    """Shares out the last of a bounded queue by dynamic thresholds (Choudhury and Hahne, 1998): each process may hold
    as many events there as stay free, so that there is always room for one that had none yet.

    Only what came in while the queue was short of room, and was not read yet, counts. Positions are in bytes.
    """

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        self._admitted: deque[tuple[int, Counter[int]]] = deque()

    def admit(self, blocks: Sequence[Block], free: int, at_least: int) -> list[Block]:
        """Keep the earliest of each process's events where free more fit; at_least: what each may always hold."""
        pids, whose, counts = _by_process(blocks)
        held = np.array([self._held[pid] for pid in pids.tolist()], np.int64)
        threshold = max(_threshold(held, counts, free), at_least)
        return _earliest(blocks, whose, counts, np.maximum(threshold - held, 0))

    def admitted(self, blocks: Sequence[Block], end_position: int) -> None:
        """Count events that are in the queue now, before this position."""
        pids, _, counts = _by_process(blocks)
        by_pid = Counter(dict(zip(pids.tolist(), counts.tolist(), strict=True)))
        self._held.update(by_pid)
        self._admitted.append((end_position, by_pid))

    def read(self, position: int) -> None:
        """Forget what was before this position."""
        while self._admitted and self._admitted[0][0] <= position:
            self._held -= self._admitted.popleft()[1]


def _by_process(blocks: Sequence[Block]) -> tuple[I32, Indices, Indices]:
    """The processes, each event's as a place among them, and how many events each has."""
    pids = np.concatenate([block.pid for block in blocks])
    return np.unique(pids, return_inverse=True, return_counts=True)


def _threshold(held: I64, counts: Indices, free: int) -> int:
    """The largest number of events that each may hold with as many left free."""
    fits, exceeds = 0, free + 1
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        taken = int(np.clip(middle - held, 0, counts).sum())
        fits, exceeds = (middle, exceeds) if taken + middle <= free else (fits, middle)
    return fits


def _earliest(blocks: Sequence[Block], whose: Indices, counts: Indices, limits: I64) -> list[Block]:
    """Keep as many of each process's events as its limit says; see `_by_process`."""
    kept = _places(whose, counts, np.concatenate([block.time_ns for block in blocks])) < limits[whose]
    ends = np.cumsum([len(block) for block in blocks])
    chosen = [block.take(np.flatnonzero(kept[end - len(block) : end])) for block, end in zip(blocks, ends, strict=True)]
    return [block for block in chosen if len(block)]


def _share(counts: Indices, room: int) -> int:
    """The largest number of which each process may have as many, with no more than room in total."""
    rising = np.sort(counts)
    before = np.concatenate([[0], np.cumsum(rising)[:-1]])
    sharing = np.arange(len(rising), 0, -1)
    # where the processes from here on share equally what those before did not take
    shares = np.maximum(room - before, 0) // sharing
    fits = np.flatnonzero(shares < rising)
    return int(shares[fits[0]]) if len(fits) else int(rising[-1])


def _places(whose: Indices, counts: Indices, times: I64) -> I64:
    """Each event's number among those of its process, in the order of time."""
    order = np.lexsort((times, whose))
    starts = np.cumsum(counts) - counts
    places = np.empty(len(whose), np.int64)
    places[order] = np.arange(len(whose)) - np.repeat(starts, counts)
    return places
