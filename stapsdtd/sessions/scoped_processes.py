"""The processes that scopes name by pid, which the kernel uses again for others."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from stapsdtd.capture.engine import Followed, Scope
from stapsdtd.errors import InvalidArgumentError, KernelFeatureError, LimitReachedError, about
from stapsdtd.events.batch import EventBatch
from stapsdtd.kernel import procfs
from stapsdtd.kernel.host_calls import FOLLOW_PROCESS
from stapsdtd.runtime.slices import Turn

_log = logging.getLogger(__name__)

_FIELD = "scope.pids"
_MAX_DESCENDANTS = 4096
"""Looked for when a scope begins: some 30 us each."""
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_NO_PROCESS = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
"""EINVAL, and ENOENT since Linux 6.9: it is a thread; see pidfd_open(2)."""


def descendants(pids: Iterable[int]) -> Iterator[set[int]]:
    """As `procfs.descendants`, as far as somebody waits for it. Raises LimitReachedError."""
    count = 0
    for born in procfs.descendants(pids):
        count += len(born)
        if count > _MAX_DESCENDANTS:
            text = f"more than {_MAX_DESCENDANTS:,} processes descend from those to follow: name some of these instead"
            raise LimitReachedError(text, "descendants", "scope.follow")
        yield born


class ScopedProcesses:
    """The processes in one subscription's scope, which end one by one. Any thread may read it, and one calls `rest`."""

    def __init__(
        self, pids: Iterable[int], children: Iterable[int] = (), clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """children: what these have forked before, and so on, if they are to be followed."""
        self._named = self._left = frozenset(pids)
        self._children = frozenset(children)
        self._followed: Followed | None = None
        self._clock_ns = clock_ns
        self._ended: list[tuple[int, int]] = []
        # of _ended, by pid, as far as `rest` knows them
        self._ended_pids = np.array([], np.int32)
        self._ended_ns = np.array([], np.int64)

    @property
    def remaining(self) -> frozenset[int]:
        """Return those that have not ended."""
        return self._left | self._children if self._followed is None else self._followed.remaining()

    @property
    def scope(self) -> Scope:
        """Return them as engines take them."""
        return self._left if self._followed is None else frozenset({self._followed})

    def follow(self, follow: Callable[[frozenset[int]], Followed]) -> Generator[None, None, None]:
        """Have the children of these processes join them, those that there are, and those to come, in steps.

        follow: begins to follow some processes. Raises what that does, and OSError.
        """
        followed = follow(self._left)
        # as of now, since children may have forked before they were followed
        known = self._left | self._children
        turn = Turn()
        for born in chain([self._children], descendants(known)):
            # of one thread there may be none, or thousands
            for pid in (None, *born):
                if turn.is_over:
                    yield
                    turn.begin()
                if pid is not None:
                    followed.adopt(pid)
        self._followed = followed
        for pid in self._named - self._left:
            followed.ended(pid)

    def ended(self, pid: int) -> None:
        """Note that a process has ended: later events of this pid are another's. What that fired between the exit and
        this call cannot be told apart.
        """
        self._ended.append((pid, self._clock_ns()))
        self._left -= {pid}
        if self._followed is not None:
            self._followed.ended(pid)

    def rest(self, batch: EventBatch) -> EventBatch:
        """Return a batch without the events of processes that took over the pid of one that ended."""
        if len(self._ended) > len(self._ended_pids):
            ended = np.array(sorted(self._ended), np.int64)
            self._ended_pids, self._ended_ns = ended[:, 0].astype(np.int32), ended[:, 1]
        if not len(self._ended_pids):
            return batch
        at = np.minimum(np.searchsorted(self._ended_pids, batch.pid), len(self._ended_pids) - 1)
        foreign = (self._ended_pids[at] == batch.pid) & (batch.time_ns > self._ended_ns[at])
        return batch.take(np.flatnonzero(~foreign)) if np.count_nonzero(foreign) else batch


@dataclass(slots=True, eq=False)
class _Process:
    """on_exit: of each scope that names it."""

    pidfd: int
    on_exit: list[Callable[[int], None]] = field(default_factory=list)


class ProcessExits:
    """Reports when processes end, the last thread included. Runs on an event loop.

    A process has one pidfd, however many scopes name it. All together take a quarter of the descriptors at most: the
    rest is for files, rings and clients.
    """

    def __init__(self, max_processes: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_processes = max_processes or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
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

    def notice(self, pid: int) -> None:
        """Report the end of a process now, rather than soon, if another one may have its pid already."""
        process = self._processes.get(pid)
        if process is not None and _is_reaped(process.pidfd):
            self._end(pid)

    def _find(self, pid: int) -> _Process:
        self.notice(pid)
        process = self._processes.get(pid)
        if process is None:
            if len(self._processes) >= self._max_processes:
                text = f"the server follows {self._max_processes} processes, which is its limit"
                raise LimitReachedError(text, "processes", _FIELD)
            pidfd = _open(pid)
            try:
                self._loop.add_reader(pidfd, self._end, pid)
            except BaseException:
                os.close(pidfd)
                raise
            process = self._processes[pid] = _Process(pidfd)
        return process

    def _end(self, pid: int) -> None:
        for on_exit in list(self._forget(pid).on_exit):
            try:
                on_exit(pid)
            except Exception:  # noqa: BLE001 - the other scopes are to be told as well
                _log.exception("process %d: its end cannot be handled", pid)

    def _forget(self, pid: int) -> _Process:
        process = self._processes.pop(pid)
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        return process


def _open(pid: int) -> int:
    """Raises InvalidArgumentError, LimitReachedError, and KernelFeatureError if this host has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            refusal = FOLLOW_PROCESS.of(error, f"process {pid}")
            text = f"the server can follow no more processes: {refusal}"
            raise LimitReachedError(text, "descriptors", _FIELD) from error
        if error.errno not in _NO_PROCESS:
            reason, remedy = f"pidfd_open: {os.strerror(error.errno or 0)}", FOLLOW_PROCESS.remedy(error.errno or 0)
            with about(_FIELD):
                raise KernelFeatureError("pidfds", reason, f"{remedy}; or trace without --pid") from error
        leader = procfs.tgid(pid)
        if leader not in {None, pid}:
            raise InvalidArgumentError(_FIELD, f"{pid} is a thread of process {leader}", value=pid) from error
        raise InvalidArgumentError(_FIELD, f"there is no process {pid}", value=pid) from error


def _is_reaped(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
