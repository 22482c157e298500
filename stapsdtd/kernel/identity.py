"""Who a process is, for people to read: psutil's view, its command line, and where it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil

from stapsdtd.errors import ObjectPendingError
from stapsdtd.kernel import cgroups, procfs
from stapsdtd.kernel.containers import placement
from stapsdtd.kernel.locked import LockedCalls

_MOST_BYTES = 4096
"""Of a command line, which may have gigabytes."""
_MOST_BYTES_OF_ALL = 16 << 20
_SLOW_SECONDS = 0.01
_MOST_SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """started_ns is Unix time; user is a name, or the number of one without.

    command_line: as much of it as was to be had at once. cgroup: the path in the unified hierarchy. container_id: the
    innermost container's id or name. Both are empty where there is none. namespace_pid: the process's number in its own
    pid namespace.
    """

    pid: int
    comm: str
    command_line: tuple[str, ...]
    user: str
    started_ns: int
    cgroup: str
    container_id: str
    namespace_pid: int


class Identities:
    """Reads those of one list of processes, in one thread. calls: what reads command lines.

    A process can have whoever reads its command line wait: once those that took long took a second together, the rest
    of the list goes without.
    """

    def __init__(self, calls: LockedCalls, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._clock = clock
        self._slow_seconds_left = _MOST_SLOW_SECONDS
        self._bytes_left = _MOST_BYTES_OF_ALL

    def of(self, pid: int) -> ProcessIdentity | None:
        """Return None where the process is gone."""
        try:
            process = psutil.Process(pid)
            placed = placement(procfs.cgroup_lines(pid))
            with process.oneshot():
                return ProcessIdentity(
                    pid,
                    # psutil.Process.name() reads the command line where the name is long
                    _printable(procfs.comm(pid)),
                    tuple(map(_printable, self._command_line(pid))),
                    _printable(os.fsencode(process.username())),
                    int(process.create_time() * 1e9),
                    _printable(os.fsencode(cgroups.from_root(placed.cgroup))),
                    placed.container,
                    procfs.namespace_pid(pid) or pid,
                )
        except psutil.Error:
            return None

    def _command_line(self, pid: int) -> list[bytes]:
        most = min(_MOST_BYTES, self._bytes_left)
        if self._slow_seconds_left <= 0 or not most:
            return []
        begin = self._clock()
        try:
            found = self._calls.call(pid, partial(procfs.command_line, pid, most))
        except (ObjectPendingError, OSError):
            found = []
        took = self._clock() - begin
        if took > _SLOW_SECONDS:
            self._slow_seconds_left -= took
        self._bytes_left -= sum(len(argument) + 1 for argument in found)
        return found


def _printable(text: bytes) -> str:
    """No message can carry what is not UTF-8."""
    return text.decode(errors="backslashreplace")
