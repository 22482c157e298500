"""Sets of sequence numbers."""

from __future__ import annotations


class SeqRanges:
    """A set of sequence numbers that come in long runs. count: how many there are."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []
        self.count = 0

    def add(self, first: int, end: int) -> int:
        """Add the numbers from first up to, but not including, end. Return how many are new."""
        if end <= first:
            return 0
        before = self.count
        touching = [run for run in self._runs if run[0] <= end and first <= run[1]]
        joined = (min([first, *(run[0] for run in touching)]), max([end, *(run[1] for run in touching)]))
        self._replace(touching, [joined])
        return self.count - before

    def remove(self, first: int, end: int) -> int:
        """Remove the numbers from first up to, but not including, end. Return how many there were."""
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
