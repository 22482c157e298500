"""Allocates runs of a table's entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)


class TableFullError(Exception):
    """There is no run of so many free entries. The message names the table."""


class Pool:
    """Allocates entries from `first` on. Neighboring free runs are joined."""

    def __init__(self, name: str, entries: int, first: int = 0) -> None:
        self._name = name
        self._free = [(first, entries - first)]

    def allocate(self, count: int) -> int:
        """Return the first entry of the run. Raises TableFullError."""
        for position, (start, length) in enumerate(self._free):
            if length >= count:
                if length == count:
                    del self._free[position]
                else:
                    self._free[position] = (start + count, length - count)
                return start
        raise TableFullError(f"the bpf engine's table of {self._name} is full")

    def free(self, start: int, count: int) -> None:
        if not count:
            return
        position = bisect_left(self._free, (start, 0))
        if position < len(self._free) and self._free[position][0] == start + count:
            count += self._free.pop(position)[1]
        if position and sum(self._free[position - 1]) == start:
            before, length = self._free.pop(position - 1)
            start, count = before, length + count
        insort(self._free, (start, count))


class Shared(Generic[_K]):
    """Allocates one run for all users of the same content."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._allocated: dict[_K, tuple[int, int, int]] = {}

    def allocate(self, content: _K, count: int) -> tuple[int, bool]:
        """Return the first entry of the run, and whether it is new and must be written. Raises TableFullError."""
        start, count, users = self._allocated.get(content) or (self._pool.allocate(count), count, 0)
        self._allocated[content] = start, count, users + 1
        return start, not users

    def free(self, content: _K) -> None:
        start, count, users = self._allocated.pop(content)
        if users > 1:
            self._allocated[content] = start, count, users - 1
        else:
            self._pool.free(start, count)
