"""Which events are kept where not all can be: each process gets as much as the busiest ones have to share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stapsdtd.capture.batch import Block


def shared_out(blocks: Sequence[Block], room: int, at_least: int = 0) -> list[Block]:
    """Keep about room events, the earliest of each process, and at_least so many of each even if that is more.

    What a process with few events does not use is for the others, so that one that floods costs none but itself.
    """
    pids = np.concatenate([block.pid for block in blocks])
    if len(pids) <= room:
        return list(blocks)
    _, whose, counts = np.unique(pids, return_inverse=True, return_counts=True)
    kept = _places(whose, counts, np.concatenate([block.time_ns for block in blocks])) < max(
        _share(counts, room), at_least
    )
    ends = np.cumsum([len(block) for block in blocks])
    chosen = [block.take(np.flatnonzero(kept[end - len(block) : end])) for block, end in zip(blocks, ends, strict=True)]
    return [block for block in chosen if len(block)]


def _share(counts: NDArray[np.int64], room: int) -> int:
    """The largest number of which each process may have as many, with no more than room in total."""
    rising = np.sort(counts)
    before = np.concatenate([[0], np.cumsum(rising)[:-1]])
    sharing = np.arange(len(rising), 0, -1)
    # where the processes from here on share equally what those before did not take
    shares = np.maximum(room - before, 0) // sharing
    fits = np.flatnonzero(shares < rising)
    return int(shares[fits[0]]) if len(fits) else int(rising[-1])


def _places(whose: NDArray[np.int64], counts: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each event's number among those of its process, in the order of time."""
    order = np.lexsort((times, whose))
    starts = np.cumsum(counts) - counts
    places = np.empty(len(whose), np.int64)
    places[order] = np.arange(len(whose)) - np.repeat(starts, counts)
    return places
