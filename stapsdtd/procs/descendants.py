"""Follows processes and what they fork, by the process connector, for an engine that does not do so in the kernel.

The connector reports a fork before the child runs (copy_process in kernel/fork.c), so whoever reads it before it looks
at an event knows whose child fired.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from stapsdtd.errors import KernelFeatureError
from stapsdtd.kernel import procfs

I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_log = logging.getLogger(__name__)

_KEPT_NS = 10_000_000_000


class FollowedProcesses:
    """Processes and their descendants. Any thread may use it.

    A process is remembered for some seconds after its end, since its events may still be in a buffer.
    """

    def __init__(self, descendants: Descendants, pids: Iterable[int]) -> None:
        self._descendants = descendants
        self._ended_ns: dict[int, int | None] = dict.fromkeys(pids)

    def remaining(self) -> frozenset[int]:
        """Return the processes that have not ended."""
        with self._descendants.up_to_date():
            return frozenset(pid for pid, ended_ns in self._ended_ns.items() if ended_ns is None)

    def adopt(self, pid: int) -> None:
        """Add a process that one of these forked before."""
        with self._descendants.up_to_date():
            if pid not in self._ended_ns and not procfs.has_ended(pid):
                self._ended_ns[pid] = None

    def ended(self, pid: int) -> None:
        """Do nothing: the connector reports it."""

    def among(self, pids: I32) -> Bools:
        """Report for each of some processes whether it is followed."""
        with self._descendants.up_to_date():
            members = np.fromiter(self._ended_ns, np.int32)
        return np.isin(pids, members)

    def close(self) -> None:
        self._descendants.forget(self)

    def forked(self, pid: int, parent: int) -> None:
        """Add a child, or forget an earlier process that had the id of one that is none."""
        if parent in self._ended_ns:
            self._ended_ns[pid] = None
        else:
            self._ended_ns.pop(pid, None)

    def exited(self, pid: int, now_ns: int) -> None:
        """Note a process's end, and forget those that ended long ago."""
        if pid in self._ended_ns:
            self._ended_ns[pid] = now_ns
            kept = {
                each: ended_ns
                for each, ended_ns in self._ended_ns.items()
                if ended_ns is None or now_ns - ended_ns <= _KEPT_NS
            }
            self._ended_ns = kept

    def find_missed(self, parents: dict[int, int | None]) -> None:
        """Add the children that are known to /proc, and note who is not. parents: of all processes."""
        for pid in self._ended_ns.keys() - parents.keys():
            self.exited(pid, self._descendants.now_ns())
        while born := {pid for pid, parent in parents.items() if parent in self._ended_ns} - self._ended_ns.keys():
            self._ended_ns |= dict.fromkeys(born)


class Descendants:
    """All processes that are followed. The watcher reports forks and ends; `follow` may be called in any thread."""

    def __init__(self, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.now_ns = clock_ns
        self._lock = threading.RLock()
        self._followed: list[FollowedProcesses] = []
        self._catch_up: Callable[[], None] | None = None

    def connect(self, catch_up: Callable[[], None]) -> None:
        """Begin: forked() and exited() are called from now on. catch_up: calls them for what is still unread."""
        self._catch_up = catch_up

    def disconnect(self) -> None:
        self._catch_up = None

    def follow(self, pids: Iterable[int]) -> FollowedProcesses:
        """Follow processes, and what they fork from now on. Raises KernelFeatureError without a process connector."""
        if self._catch_up is None:
            raise KernelFeatureError(
                "following processes",
                "the process connector is unavailable",
                "run as root in the initial network namespace, on a kernel with CONFIG_PROC_EVENTS",
            )
        followed = FollowedProcesses(self, pids)
        with self._lock:
            self._followed.append(followed)
        return followed

    def forget(self, followed: FollowedProcesses) -> None:
        with self._lock:
            self._followed.remove(followed)

    def up_to_date(self) -> threading.RLock:
        """Take note of all that the kernel has reported. Return a lock that is to be held while it is used."""
        if self._catch_up is not None:
            self._catch_up()
        return self._lock

    def forked(self, tid: int, pid: int, parent: int) -> None:
        if tid == pid:
            with self._lock:
                for followed in self._followed:
                    followed.forked(pid, parent)

    def exited(self, tid: int, pid: int) -> None:
        # a process whose first thread ended before the others is remembered for some seconds
        if tid == pid:
            with self._lock:
                for followed in self._followed:
                    followed.exited(pid, self.now_ns())

    def missed(self) -> None:
        """Look for children in /proc, since forks went unnoticed. Those whose parents are gone, too, are lost."""
        with self._lock:
            if self._followed:
                _log.warning("the kernel dropped reports of forks: some processes may not be followed")
                parents = {pid: procfs.parent(pid) for pid in procfs.pids()}
                for followed in self._followed:
                    followed.find_missed(parents)
