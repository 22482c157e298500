"""Numbered places in the kernel that subscriptions take, and programs that are attached while any is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from stapsdtd.capture.bpf.pool import TableFullError

_SHARE = 4
"""One owner may have so large a part."""


class Placed(Protocol):
    """What is in a place. number: of the place."""

    @property
    def number(self) -> int: ...

    @property
    def owner(self) -> str: ...

    def close(self) -> None: ...


_P = TypeVar("_P", bound=Placed)


class Places(Generic[_P]):
    """Called from one thread."""

    def __init__(self, count: int, what: str, attach: Callable[[], list[int]], take: Callable[[int], None]) -> None:
        """what: completes "CLIENT ... 16 times". attach: the programs. take: empties a place; raises OSError."""
        self._count = count
        self._what = what
        self._attach = attach
        self._take = take
        self._links: list[int] = []
        self._taken: dict[int, _P] = {}
        self._ending: list[tuple[Future[None], _P]] = []

    @property
    def all(self) -> list[_P]:
        return list(self._taken.values())

    def put(self, make: Callable[[int], _P], owner: str, put: Callable[[_P], None]) -> _P:
        """Return what `make` makes for a free place's number, once `put` has put it there.

        Raises TableFullError and OSError.
        """
        self.collect()
        most = self._count // _SHARE
        if sum(each.owner == owner for each in self._taken.values()) >= most:
            raise TableFullError(f"{owner} {self._what} {most} times, which is the limit")
        free = next((number for number in range(self._count) if number not in self._taken), None)
        if free is None:
            raise TableFullError(f"subscriptions {self._what} {self._count} times, which is the limit")
        if not self._links:
            self._links = self._attach()
        try:
            self._taken[free] = made = make(free)
        except BaseException:
            self._detach_unused()
            raise
        try:
            put(made)
        except BaseException:
            self._empty(made)
            raise
        return made

    def end(self, placed: _P, tested: Future[None]) -> None:
        """Empty a place. tested: done when no hit can look there any more."""
        self._ending.append((tested, placed))

    def collect(self) -> None:
        """Empty the places whose last hit is over."""
        ended = [placed for tested, placed in self._ending if tested.done()]
        self._ending = [each for each in self._ending if each[1] not in ended]
        for placed in ended:
            self._empty(placed)

    def _empty(self, placed: _P) -> None:
        del self._taken[placed.number]
        placed.close()
        try:
            self._take(placed.number)
        except FileNotFoundError:
            # it was never put there
            pass
        finally:
            self._detach_unused()

    def _detach_unused(self) -> None:
        while self._links and not self._taken:
            os.close(self._links.pop())

    def close(self) -> None:
        for placed in self.all:
            placed.close()
        self._taken.clear()
        self._detach_unused()
