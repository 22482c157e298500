"""tracefs events seen through perf: which processes an event arms, and the program that runs at its hits.

A uprobe event arms nothing until perf opens it, for every process or for one; a program linked to one of its perf
events runs for all of them (kernel/trace/trace_uprobe.c, bpf_trace.c).
"""

from __future__ import annotations

import ctypes
import os
import platform

from stapsdtd.kernel.libbpf import link_perf_event
from stapsdtd.kernel.perf import _FLAG_FD_CLOEXEC, _SYSCALL, _libc, _PerfEventAttr, online_cpus
from stapsdtd.kernel.tracefs import Tracefs

_TYPE_TRACEPOINT = 2


def _perf_event(event_id: int, pid: int | None) -> int:
    """Raises OSError; ESRCH where there is no such process."""
    attributes = _PerfEventAttr(
        type=_TYPE_TRACEPOINT, size=ctypes.sizeof(_PerfEventAttr), config=event_id, sample_period=1
    )
    scope = (-1, online_cpus()[0]) if pid is None else (pid, -1)
    descriptor: int = _libc.syscall(
        _SYSCALL[platform.machine()], ctypes.byref(attributes), *scope, -1, _FLAG_FD_CLOEXEC
    )
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"perf_event_open: {os.strerror(number)}")
    return descriptor


class ProbeEvent:
    """A multi-probe uprobe event, defined, armed for processes, and linked with a program."""

    def __init__(self, tracefs: Tracefs, group: str, name: str, places: list[str]) -> None:
        """places: `PATH:0xOFFSET(0xREFCTR)` of each site. Raises TracefsRejectedError; nothing is left then."""
        self._tracefs = tracefs
        self._name = f"{group}/{name}"
        self._scopes: dict[int | None, int] = {}
        self._link: int | None = None
        self._defined = False
        try:
            for place in places:
                tracefs.append_definition(f"p:{self._name} {place}")
                self._defined = True
            self._id = int(tracefs.read(f"events/{self._name}/id"))
        except BaseException:
            self.remove()
            raise

    def arm(self, pid: int | None, program: int, cookie: int) -> None:
        """Patch the sites in a process's memory, or with None in every process's, now and later. Raises OSError."""
        if pid in self._scopes:
            return
        self._scopes[pid] = _perf_event(self._id, pid)
        if self._link is None:
            self._link = link_perf_event(program, self._scopes[pid], cookie)

    def remove(self) -> None:
        """Disarm it and wait until no hit is on its way any more. Raises TracefsRejectedError."""
        if self._link is not None:
            os.close(self._link)
            self._link = None
        while self._scopes:
            os.close(self._scopes.popitem()[1])
        if self._defined:
            self._tracefs.append_definition(f"-:{self._name}")
            self._defined = False
