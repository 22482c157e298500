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
MAX_HELD = 100_000
"""Entries and returns of all threads that wait, as those that a call led to which has not returned."""


@dataclass(slots=True)
class _Call(Generic[_T]):
    """held: what is to be shown of it, and of those that it led to, once it is known to count. counts: it led to the
    last function.
    """

    held: list[_T] = field(default_factory=list)
    counts: bool = False


class CallStacks(Generic[_T]):
    """Of events of any kind. forgotten: of how many threads calls were forgotten, for which there was no room."""

    def __init__(self, chain: Sequence[str], awaited: Collection[str] = ()) -> None:
        """awaited: functions whose calls count only if their returns come."""
        self._positions = {function: position for position, function in enumerate(chain)}
        self._awaited = [function in awaited for function in chain]
        self._threads: dict[int, list[_Call[_T]]] = {}
        self._held = 0
        self.forgotten = 0

    def entered(self, tid: int, function: str, event: _T) -> list[_T]:
        """Return the events to show now."""
        position = self._positions[function]
        calls = self._threads.get(tid, [])
        if len(calls) < position:
            # those that led to it were lost, or not wanted
            return []
        # what is deeper returned unseen, or not as it was to
        self._drop(calls, position)
        calls.append(_Call([event]))
        self._held += 1
        self._threads.pop(tid, None)
        self._threads[tid] = calls
        is_last = position == len(self._positions) - 1
        shown = self._accept(calls) if is_last and not self._awaited[position] else []
        self._make_room()
        return shown

    def returned(self, tid: int, function: str, event: _T) -> list[_T]:
        """Return the events to show now."""
        position = self._positions[function]
        calls = self._threads.get(tid, [])
        self._drop(calls, position + 1)
        if len(calls) <= position:
            # it was entered before anybody looked
            return []
        is_last = position == len(self._positions) - 1
        shown = []
        if calls[position].counts or is_last:
            calls[position].held.append(event)
            self._held += 1
            shown = self._accept(calls)
        self._drop(calls, position)
        if not calls:
            del self._threads[tid]
        self._make_room()
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
            self._held -= len(lines)
            return lines
        calls[around[-1]].held += lines
        calls[around[-1]].counts = True
        return []

    def _drop(self, calls: list[_Call[_T]], position: int) -> None:
        """Forget those from a position on."""
        self._held -= sum(len(call.held) for call in calls[position:])
        del calls[position:]

    def _make_room(self) -> None:
        if len(self._threads) > MAX_THREADS:
            self._forget(next(iter(self._threads)))
        if self._held > MAX_HELD:
            self._forget(max(self._threads, key=lambda tid: sum(len(call.held) for call in self._threads[tid])))

    def _forget(self, tid: int) -> None:
        self._drop(self._threads.pop(tid), 0)
        self.forgotten += 1

    def forget(self) -> None:
        """Forget all calls, since some entries or returns were lost."""
        self._threads.clear()
        self._held = 0
