"""Who a process is, for people to read: psutil's view, and where it runs."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from stapsdtd.kernel import cgroups, procfs
from stapsdtd.kernel.containers import placement


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """started_ns is Unix time; user is a name, or the number of one without.

    cgroup: the path in the unified hierarchy. container_id: the innermost container's id or name. Both are empty where
    there is none. namespace_pid: the process's number in its own pid namespace.
    """

    pid: int
    comm: str
    command_line: tuple[str, ...]
    user: str
    started_ns: int
    cgroup: str
    container_id: str
    namespace_pid: int


def identify(pid: int) -> ProcessIdentity | None:
    """Answer None where the process is gone."""
    try:
        process = psutil.Process(pid)
        placed = placement(procfs.cgroup_lines(pid))
        with process.oneshot():
            return ProcessIdentity(
                pid,
                _printable(process.name()),
                tuple(_printable(argument) for argument in process.cmdline()),
                _printable(process.username()),
                int(process.create_time() * 1e9),
                _printable(cgroups.from_root(placed.cgroup)),
                placed.container,
                procfs.namespace_pid(pid) or pid,
            )
    except psutil.Error:
        return None


def _printable(text: str) -> str:
    """Psutil keeps what is not UTF-8 as surrogates, which no message can carry."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")
