"""tracefs events seen through perf: which processes an event arms, and the program that runs at its hits.

A uprobe event arms nothing until perf opens it, for every process or for one; a program linked to one of its perf
events runs for all of them (kernel/trace/trace_uprobe.c, bpf_trace.c). So the program is linked first, to an event that
arms nobody, and no hit finds a site patched and the program not there yet.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from stapsdtd.kernel.libbpf import link_perf_event
from stapsdtd.kernel.perf import ALL_CPUS, ALL_PROCESSES, PerfEventAttributes, online_cpus, open_perf_event
from stapsdtd.kernel.tracefs import Tracefs

_TYPE_TRACEPOINT = 2
_KERNEL_THREAD = 2
"""kthreadd (init/main.c): it has no memory, so that an event for it patches nothing."""


class ProbeEvent:
    """A multi-probe uprobe event, defined, armed for processes, and linked with a program."""

    def __init__(self, tracefs: Tracefs, group: str, name: str, places: Sequence[str]) -> None:
        """places: `PATH:0xOFFSET(0xREFCTR)` of each site. Raises TracefsRejectedError; nothing is left then."""
        self._tracefs = tracefs
        self._name = f"{group}/{name}"
        self._scopes: dict[int | None, int] = {}
        self._carrier: int | None = None
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
        """Patch the sites in a process's memory, or with None in every process's, now and later.

        Raises OSError; ESRCH where there is no such process.
        """
        if self._carrier is None:
            self._carrier = self._opened(_KERNEL_THREAD, ALL_CPUS)
        if self._link is None:
            self._link = link_perf_event(program, self._carrier, cookie)
        if pid not in self._scopes:
            self._scopes[pid] = (
                self._opened(ALL_PROCESSES, online_cpus()[0]) if pid is None else self._opened(pid, ALL_CPUS)
            )

    def _opened(self, pid: int, cpu: int) -> int:
        return open_perf_event(PerfEventAttributes(type=_TYPE_TRACEPOINT, config=self._id, sample_period=1), pid, cpu)

    def unpatch(self) -> None:
        """Take it out of all processes, whose semaphores fall at once. No grace period is waited for."""
        while self._scopes:
            try:
                _, descriptor = self._scopes.popitem()
            except KeyError:
                # another thread took the last one
                return
            os.close(descriptor)

    def disarm(self) -> None:
        """The same, and wait until no hit runs the program any more: for as long as another's sleeps at a hit.

        Since Linux 6.13 the kernel waits with none of its locks held (perf_event_detach_bpf_prog).
        """
        self.unpatch()
        if self._link is not None:
            link, self._link = self._link, None
            os.close(link)

    def remove(self) -> None:
        """Disarm it, and forget its definition. Raises TracefsRejectedError."""
        self.disarm()
        if self._carrier is not None:
            carrier, self._carrier = self._carrier, None
            os.close(carrier)
        if self._defined:
            self._tracefs.append_definition(f"-:{self._name}")
            self._defined = False
