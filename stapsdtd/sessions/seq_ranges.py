"""Sets of sequence numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

_MOST_RUNS = 1024
_first, _end = itemgetter(0), itemgetter(1)


class SeqRanges:
    """A set of sequence numbers that come in long runs. count: how many there are.

    Of the latest runs it is known which numbers they have. What is older counts, and neither joins the set nor leaves
    it any more: a client that reads now and then would make a run each time, for as long as it is subscribed.
    """

    def __init__(self, most_runs: int = _MOST_RUNS) -> None:
        self._most_runs = most_runs
        self._runs: list[tuple[int, int]] = []
        """Apart from each other, in order."""
        self._settled_to = 0
        self.count = 0

    def add(self, first: int, end: int) -> int:
        """Add the numbers from first up to, but not including, end. Return how many are new."""
        first = max(first, self._settled_to)
        if end <= first:
            return 0
        # those that it overlaps or touches
        position = bisect_left(self._runs, first, key=_end)
        to = bisect_right(self._runs, end, key=_first)
        touching = self._runs[position:to]
        joined = min([first, *map(_first, touching)]), max([end, *map(_end, touching)])
        added = self._replace(position, to, [joined])
        while len(self._runs) > self._most_runs:
            self._settled_to = self._runs.pop(0)[1]
        return added

    def remove(self, first: int, end: int) -> int:
        """Remove the numbers from first up to, but not including, end. Return how many there were."""
        if end <= first:
            return 0
        position = bisect_right(self._runs, first, key=_end)
        to = bisect_left(self._runs, end, key=_first)
        touched = self._runs[position:to]
        before = [(run[0], first) for run in touched if run[0] < first]
        after = [(end, run[1]) for run in touched if end < run[1]]
        return -self._replace(position, to, before + after)

    def _replace(self, position: int, to: int, new: list[tuple[int, int]]) -> int:
        """Replace runs, and return by how many numbers there are more."""
        more = sum(end - first for first, end in new) - sum(end - first for first, end in self._runs[position:to])
        self._runs[position:to] = new
        self.count += more
        return more
