"""Describe processes for people: user, start time, command line, cgroup and container."""

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

_MAX_BYTES = 4096
"""Of one command line, which can have gigabytes."""
_MAX_TOTAL_BYTES = 16 << 20
_SLOW_SECONDS = 0.01
_MAX_SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """started_ns is Unix time; user is a name, or the uid if it has none.

    command_line: possibly truncated, or empty if reading it took too long. cgroup: the path in the unified hierarchy.
    container_id: the innermost container's id or name. Both are empty if there is none. namespace_pid: the pid in the
    process's own pid namespace.
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
    """Reads the identities for one listing, in one thread. calls: reads the command lines.

    A process can delay readers of its command line: once slow reads add up to a second, the rest of the listing goes
    without command lines.
    """

    def __init__(self, calls: LockedCalls, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = calls
        self._clock = clock
        self._slow_seconds_left = _MAX_SLOW_SECONDS
        self._bytes_left = _MAX_TOTAL_BYTES

    def of(self, pid: int) -> ProcessIdentity | None:
        """Return None if the process is gone."""
        try:
            process = psutil.Process(pid)
            placed = placement(procfs.cgroup_lines(pid))
            with process.oneshot():
                return ProcessIdentity(
                    pid,
                    # psutil.Process.name() reads the command line if the name is long
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
        max_bytes = min(_MAX_BYTES, self._bytes_left)
        if self._slow_seconds_left <= 0 or not max_bytes:
            return []
        begin = self._clock()
        try:
            arguments = self._calls.call(pid, partial(procfs.command_line, pid, max_bytes))
        except (ObjectPendingError, OSError):
            arguments = []
        elapsed = self._clock() - begin
        if elapsed > _SLOW_SECONDS:
            self._slow_seconds_left -= elapsed
        self._bytes_left -= sum(len(argument) + 1 for argument in arguments)
        return arguments


def _printable(text: bytes) -> str:
    """Escape what is not UTF-8, which messages cannot carry."""
    return text.decode(errors="backslashreplace")
