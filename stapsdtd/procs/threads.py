"""Maps threads to processes, since an ftrace event names only its thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stapsdtd.kernel import procfs

I32 = npt.NDArray[np.int32]

_KEPT_NS = 10_000_000_000
_MOST_KEPT = 100_000
"""Threads that ended: some 10 MiB."""


class Threads:
    """Filled by the watcher, read by the engine's reader thread.

    A thread is remembered for some seconds after its end, since its events may still be in a buffer.
    """

    def __init__(
        self,
        *,
        tgid: Callable[[int], int | None] = procfs.tgid,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """tgid: returns a live thread's process."""
        self._tgid = tgid
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._process: dict[int, int] = {}
        self._past: dict[int, tuple[int, int]] = {}
        self._ended: deque[tuple[int, int]] = deque()
        self._catch_up: Callable[[], None] = lambda: None
        self._remembers = False

    def follow(self, catch_up: Callable[[], None]) -> None:
        """Begin to remember threads: forked() and exited() are called from now on. catch_up: calls them for what is
        still unread.
        """
        self._catch_up = catch_up
        self._remembers = True

    def unfollow(self) -> None:
        with self._lock:
            self._catch_up = lambda: None
            self._remembers = False
            self._process.clear()
            self._past.clear()
            self._ended.clear()

    def forked(self, tid: int, pid: int) -> None:
        with self._lock:
            self._past.pop(tid, None)
            if tid != pid:
                self._process[tid] = pid
            else:
                self._process.pop(tid, None)

    def exited(self, tid: int, pid: int) -> None:
        now = self._clock_ns()
        with self._lock:
            known = self._process.pop(tid, None)
            if tid != pid or known is not None:
                self._past[tid] = pid, now
                self._ended.append((now, tid))
            while self._ended and (now - self._ended[0][0] > _KEPT_NS or len(self._ended) > _MOST_KEPT):
                ended_ns, other = self._ended.popleft()
                if other in self._past and self._past[other][1] == ended_ns:
                    del self._past[other]

    def missed(self) -> None:
        """Forget living threads, since forks and exits went unnoticed; they are looked up again."""
        with self._lock:
            self._process.clear()

    def pids_of(self, tids: I32) -> I32:
        """Return each thread's process, or the tid itself if that is not known any more."""
        distinct, positions = np.unique(tids, return_inverse=True)
        pids = np.array([self._pid_of(tid) for tid in distinct.tolist()], np.int32)
        return pids[positions]

    def _pid_of(self, tid: int) -> int:
        pid = self._known(tid)
        if pid is not None:
            return pid
        pid = self._tgid(tid)
        if pid is None:
            self._catch_up()
            known = self._known(tid)
            return tid if known is None else known
        if self._remembers:
            with self._lock:
                self._process[tid] = pid
        return pid

    def _known(self, tid: int) -> int | None:
        pid = self._process.get(tid)
        if pid is None and (past := self._past.get(tid)):
            return past[0]
        return pid
