"""Calls that led to each other: of `--stack a b c`, those of a in which b was called, and c in that.

a enters          nothing is known yet
b enters
c enters      a, b and c are shown as entered
c returns     c is shown, as it returns
b returns       b
a returns         a

The server delivers only calls that those before them led to. What is left to do is to wait: for the last one to be
entered, and for the returns of calls that count only if these satisfy a condition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_T = TypeVar("_T")

MAX_THREADS = 10_000
"""Of which there are calls. A call may never return, as that of a thread that exits in it."""


@dataclass(slots=True)
class _Call(Generic[_T]):
    """held: what is to be shown of it, and of those that it led to, once it is known to count. counts: it led to the
    last function.
    """

    held: list[_T] = field(default_factory=list)
    counts: bool = False


class CallStacks(Generic[_T]):
    """Of events of any kind. forgotten: how many threads there was no room for."""

    def __init__(self, chain: Sequence[str], awaited: Collection[str] = ()) -> None:
        """awaited: functions whose calls count only if their returns come."""
        self._positions = {function: position for position, function in enumerate(chain)}
        self._awaited = [function in awaited for function in chain]
        self._threads: dict[int, list[_Call[_T]]] = {}
        self.forgotten = 0

    def entered(self, tid: int, function: str, event: _T) -> list[_T]:
        """Return the events to show now."""
        position = self._positions[function]
        calls = self._threads.pop(tid, [])
        if len(calls) < position:
            # those that led to it were lost
            return []
        # what is deeper returned unseen, or not as it was to
        calls[position:] = [_Call([event])]
        self._threads[tid] = calls
        if len(self._threads) > MAX_THREADS:
            del self._threads[next(iter(self._threads))]
            self.forgotten += 1
        is_last = position == len(self._positions) - 1
        return self._accept(calls) if is_last and not self._awaited[position] else []

    def returned(self, tid: int, function: str, event: _T) -> list[_T]:
        """Return the events to show now."""
        position = self._positions[function]
        calls = self._threads.get(tid, [])
        del calls[position + 1 :]
        if len(calls) <= position:
            # it was entered before anybody looked
            return []
        is_last = position == len(self._positions) - 1
        shown = []
        if calls[position].counts or is_last:
            calls[position].held.append(event)
            shown = self._accept(calls)
        calls.pop()
        if not calls:
            del self._threads[tid]
        return shown

    def _accept(self, calls: list[_Call[_T]]) -> list[_T]:
        """Return what is to be shown now that the last one of some calls counts, unless one around it is awaited."""
        around = [position for position in range(len(calls) - 1) if self._awaited[position]]
        lines: list[_T] = []
        for call in calls[around[-1] + 1 if around else 0 :]:
            lines += call.held
            call.held = []
            call.counts = True
        if not around:
            return lines
        calls[around[-1]].held += lines
        calls[around[-1]].counts = True
        return []

    def forget(self) -> None:
        """Forget all calls, since some entries or returns were lost."""
        self._threads.clear()
