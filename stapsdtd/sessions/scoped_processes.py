"""The processes that scopes name by pid, which the kernel uses again for others."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from stapsdtd.errors import InvalidArgumentError, LimitReachedError
from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel import procfs

_FIELD = "scope.pids"
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


class ScopedProcesses:
    """The processes in one subscription's scope, which end one by one. Any thread may read it.

    remaining: those that have not ended.
    """

    def __init__(self, pids: Iterable[int], clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.remaining = frozenset(pids)
        self._clock_ns = clock_ns
        # replaced, never changed
        self._ended_ns: dict[int, int] = {}

    def ended(self, pid: int) -> None:
        """Note that a process has ended: later events of this pid are another's."""
        self._ended_ns = {**self._ended_ns, pid: self._clock_ns()}
        self.remaining -= {pid}

    def rest(self, batch: EventBatch) -> EventBatch:
        """Return a batch without the events of processes that took over the pid of one that ended."""
        for pid, time_ns in self._ended_ns.items():
            foreign = (batch.pid == pid) & (batch.time_ns > time_ns)
            if np.count_nonzero(foreign):
                batch = batch.take(np.flatnonzero(~foreign))
        return batch


@dataclass(slots=True, eq=False)
class _Process:
    """on_exit: of each scope that names it."""

    pidfd: int
    on_exit: list[Callable[[int], None]] = field(default_factory=list)


class ProcessExits:
    """Reports when processes end, the last thread included. Runs on an event loop.

    A process has one pidfd, however many scopes name it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _Process] = {}

    def follow(self, pids: Iterable[int], on_exit: Callable[[int], None]) -> Callable[[], None]:
        """Call on_exit with each pid when its process ends. Return a function that ends that.

        Raises InvalidArgumentError if there is no such process, and LimitReachedError.
        """
        with ExitStack() as undo:
            for pid in pids:
                process = self._find(pid)
                process.on_exit.append(on_exit)
                undo.callback(self._unfollow, pid, process, on_exit)
            return undo.pop_all().close

    def _unfollow(self, pid: int, process: _Process, on_exit: Callable[[int], None]) -> None:
        process.on_exit.remove(on_exit)
        if not process.on_exit and self._processes.get(pid) is process:
            self._forget(pid)

    def close(self) -> None:
        for pid in list(self._processes):
            self._forget(pid)

    def _find(self, pid: int) -> _Process:
        process = self._processes.get(pid)
        if process is not None and _is_reaped(process.pidfd):
            # its end is reported soon; the pid may be another's already
            self._end(pid)
            process = None
        if process is None:
            process = self._processes[pid] = _Process(_open(pid))
            self._loop.add_reader(process.pidfd, self._end, pid)
        return process

    def _end(self, pid: int) -> None:
        for on_exit in list(self._forget(pid).on_exit):
            on_exit(pid)

    def _forget(self, pid: int) -> _Process:
        process = self._processes.pop(pid)
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        return process


def _open(pid: int) -> int:
    """Raises InvalidArgumentError and LimitReachedError."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise LimitReachedError("the server has no descriptors left to follow more processes") from error
        leader = procfs.tgid(pid)
        if leader not in {None, pid}:
            raise InvalidArgumentError(_FIELD, f"{pid} is a thread of process {leader}") from error
        raise InvalidArgumentError(_FIELD, f"there is no process {pid}") from error


def _is_reaped(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
