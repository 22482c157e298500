"""Scopes that follow processes: bpf/follow.h keeps their sets of process ids, from a process's fork to its end.

follow ──► set 3: {4711 named}    fork ──► {4711 named, 4712 born}    exit ──► {4712 born}
                                  tests: is this hit's process in set 3?
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from stapsdtd.capture.bpf import layout
from stapsdtd.errors import LimitReachedError
from stapsdtd.kernel.number_map import NumberMap

_log = logging.getLogger(__name__)

_PER_OWNER = layout.MAX_FOLLOWING // 4


class Kernel(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    def attach_followers(self) -> list[int]: ...

    def put_followed(self, scope: int, processes: NumberMap) -> None: ...

    def take_followed(self, scope: int) -> None: ...

    def unfollowed(self, scope: int) -> int: ...


class FollowedProcesses:
    """One scope's processes. Any thread may use it. scope: its number, which tests in the program name."""

    def __init__(self, scope: int, owner: str) -> None:
        """owner: of the subscription.

        Raises OSError if the kernel has no memory for the set.
        """
        self.scope = scope
        self.owner = owner
        self.processes = NumberMap(layout.MAX_FOLLOWED)
        self.missed = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def remaining(self) -> frozenset[int]:
        """Return the processes that have not ended."""
        with self._lock:
            return frozenset() if self._is_closed else self.processes.keys()

    def ended(self, pid: int) -> None:
        """Note that a process that was named has ended, which it may have done while it was added."""
        with self._lock:
            if not self._is_closed and self.processes.get(pid) == layout.Membership.NAMED:
                self.processes.discard(pid)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self.processes.close()


class Following:
    """All scopes that follow processes. Called from one thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._links: list[int] = []
        self._scopes: dict[int, FollowedProcesses] = {}
        self._ending: list[tuple[Future[None], FollowedProcesses]] = []

    def begin(self, pids: Iterable[int], owner: str) -> FollowedProcesses:
        """Follow processes, and what they fork from now on. Raises LimitReachedError and OSError."""
        self.collect()
        if sum(each.owner == owner for each in self._scopes.values()) >= _PER_OWNER:
            raise LimitReachedError(f"{owner} follow processes {_PER_OWNER} times, which is the limit")
        free = next((number for number in range(layout.MAX_FOLLOWING) if number not in self._scopes), None)
        if free is None:
            raise LimitReachedError(f"subscriptions follow processes {layout.MAX_FOLLOWING} times, which is the limit")
        if not self._links:
            self._links = self._kernel.attach_followers()
        followed = self._scopes[free] = FollowedProcesses(free, owner)
        try:
            self._kernel.put_followed(free, followed.processes)
            for pid in pids:
                followed.processes[pid] = layout.Membership.NAMED
        except BaseException:
            self._end(followed)
            raise
        return followed

    def end(self, followed: FollowedProcesses, tested: Future[None]) -> None:
        """Follow a scope no more. tested: done when no hit can test for it any more."""
        self._ending.append((tested, followed))

    def collect(self) -> None:
        """Release the scopes whose last hit is over, and report processes that could not be followed."""
        ended = [followed for tested, followed in self._ending if tested.done()]
        self._ending = [each for each in self._ending if each[1] not in ended]
        for followed in self._scopes.values():
            missed = self._kernel.unfollowed(followed.scope)
            if missed > followed.missed:
                followed.missed = missed
                _log.warning(
                    "%s: %d processes are not followed: a scope has room for %d, or the kernel had no memory for them",
                    followed.owner,
                    missed,
                    layout.MAX_FOLLOWED,
                )
        for followed in ended:
            self._end(followed)

    def _end(self, followed: FollowedProcesses) -> None:
        del self._scopes[followed.scope]
        followed.close()
        try:
            self._kernel.take_followed(followed.scope)
        except FileNotFoundError:
            # it was never put there
            pass
        finally:
            if not self._scopes:
                self._detach()

    def _detach(self) -> None:
        while self._links:
            os.close(self._links.pop())

    def close(self) -> None:
        self._detach()
        for followed in self._scopes.values():
            followed.close()
        self._scopes.clear()
