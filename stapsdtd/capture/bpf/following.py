"""Scopes that follow processes: bpf/follow.h keeps their sets of process ids, from a process's fork to its end.

follow ──► set 3: {4711 named}    fork ──► {4711 named, 4712 born}    exit ──► {4712 born}
                                  tests: is this hit's process in set 3?
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from stapsdtd.capture.bpf import layout
from stapsdtd.capture.bpf.places import Places
from stapsdtd.capture.bpf.pool import TableFullError
from stapsdtd.errors import LimitReachedError
from stapsdtd.kernel import procfs
from stapsdtd.kernel.number_map import NumberMap

_log = logging.getLogger(__name__)


class Kernel(Protocol):
    """See `capture.bpf.kernel.Loaded`."""

    def attach_followers(self) -> list[int]: ...

    def put_followed(self, scope: int, processes: NumberMap) -> None: ...

    def take_followed(self, scope: int) -> None: ...

    def unfollowed(self, scope: int) -> int: ...


class FollowedProcesses:
    """One scope's processes. Any thread may use it. number: of the scope, which tests in the program name."""

    def __init__(self, scope: int, owner: str) -> None:
        """owner: of the subscription.

        Raises OSError if the kernel has no memory for the set.
        """
        self.number = scope
        self.owner = owner
        self.processes = NumberMap(layout.MAX_FOLLOWED)
        self.missed = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def remaining(self) -> frozenset[int]:
        """Return the processes that have not ended."""
        with self._lock:
            return frozenset() if self._is_closed else self.processes.keys()

    def adopt(self, pid: int) -> None:
        """Follow a process that one of these forked before. Raises OSError."""
        with self._lock:
            if self._is_closed or self.processes.get(pid) is not None:
                return
            self.processes[pid] = layout.Membership.BORN
            # the program saw its end already, or sees it from now on
            if procfs.has_ended(pid):
                self.processes.discard(pid)

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
        self._places = Places[FollowedProcesses](
            layout.MAX_FOLLOWING, "follow processes", kernel.attach_followers, kernel.take_followed
        )

    def begin(self, pids: Iterable[int], owner: str) -> FollowedProcesses:
        """Follow processes, and what they fork from now on. Raises LimitReachedError and OSError."""

        def put(followed: FollowedProcesses) -> None:
            self._kernel.put_followed(followed.number, followed.processes)
            for pid in pids:
                followed.processes[pid] = layout.Membership.NAMED

        try:
            return self._places.put(lambda number: FollowedProcesses(number, owner), owner, put)
        except TableFullError as error:
            raise LimitReachedError(str(error), "scopes", "scope.follow") from None

    def end(self, followed: FollowedProcesses, tested: Future[None]) -> None:
        """Follow a scope no more. tested: done when no hit can test for it any more."""
        self._places.end(followed, tested)

    def collect(self) -> None:
        """Release the scopes whose last hit is over, and report processes that could not be followed."""
        for followed in self._places.all:
            missed = self._kernel.unfollowed(followed.number)
            if missed > followed.missed:
                followed.missed = missed
                _log.warning(
                    "%s: %d processes are not followed: a scope has room for %d, or the kernel had no memory for them",
                    followed.owner,
                    missed,
                    layout.MAX_FOLLOWED,
                )
        self._places.collect()

    def close(self) -> None:
        self._places.close()
