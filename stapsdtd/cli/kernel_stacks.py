"""Calls that led to each other: of `--stack a b c`, those of a in which b was called, and c in that.

a enters          nothing is known yet
b enters
c enters      a, b and c are shown as entered
c returns     c is shown, as it returns
b returns       b
a returns         a
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_T = TypeVar("_T")

MAX_DEPTH = 64
"""Of the traced functions in one thread. Deeper calls are counted, and do not lead to anything."""


@dataclass(slots=True)
class _Frame(Generic[_T]):
    """matched: how much of the chain there is up to this call. is_link: it is itself part of that."""

    function: str
    event: _T
    matched: int
    is_link: bool
    is_shown: bool = False


@dataclass(slots=True)
class _Stack(Generic[_T]):
    """beyond: calls deeper than MAX_DEPTH that have not returned."""

    frames: list[_Frame[_T]] = field(default_factory=list)
    beyond: int = 0


class CallStacks(Generic[_T]):
    """Of events of any kind. too_deep: how many calls were beyond MAX_DEPTH."""

    def __init__(self, chain: Sequence[str]) -> None:
        self._chain = tuple(chain)
        self._stacks: dict[int, _Stack[_T]] = {}
        self.too_deep = 0

    def entered(self, tid: int, function: str, event: _T) -> list[_T]:
        """Return the events to show now."""
        stack = self._stacks.setdefault(tid, _Stack())
        if len(stack.frames) == MAX_DEPTH:
            stack.beyond += 1
            self.too_deep += 1
            return []
        matched = stack.frames[-1].matched if stack.frames else 0
        is_link = matched < len(self._chain) and function == self._chain[matched]
        stack.frames.append(_Frame(function, event, matched + is_link, is_link))
        if not is_link or matched + 1 < len(self._chain):
            return []
        shown = [frame for frame in stack.frames if frame.is_link and not frame.is_shown]
        for frame in shown:
            frame.is_shown = True
        return [frame.event for frame in shown]

    def returned(self, tid: int, function: str, event: _T) -> list[_T]:
        """Return the events to show now."""
        stack = self._stacks.get(tid)
        if stack is None:
            # it was entered before anybody looked
            return []
        if stack.beyond:
            stack.beyond -= 1
            return []
        if all(frame.function != function for frame in stack.frames):
            return []
        # those above it returned unseen
        while (frame := stack.frames.pop()).function != function:
            pass
        if not stack.frames:
            del self._stacks[tid]
        return [event] if frame.is_shown else []

    def exited(self, tid: int) -> None:
        """Forget a thread, some of whose calls never return."""
        self._stacks.pop(tid, None)

    def forget(self) -> None:
        """Forget all calls, since some entries or returns were lost."""
        self._stacks.clear()
