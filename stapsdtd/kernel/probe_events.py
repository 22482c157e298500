"""Arm tracefs events through perf, for all processes or for single ones, and run a BPF program at their hits.

A uprobe event arms nothing until perf opens it, for every process or for one; a program linked to one of its perf
events runs for all of them (kernel/trace/trace_uprobe.c, bpf_trace.c). So the program is linked first, to a perf event
that arms no process, and is in place before any site is patched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from stapsdtd.kernel import procfs
from stapsdtd.kernel.bpf_links import link_perf_event
from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.perf import ALL_CPUS, ALL_PROCESSES, PerfEventAttributes, online_cpus, open_perf_event
from stapsdtd.kernel.places import UPROBE_EVENTS, FunctionPlace, Place
from stapsdtd.kernel.tracefs import Tracefs

_TYPE_TRACEPOINT = 2
_KERNEL_THREAD = 2
"""kthreadd (init/main.c) has no user memory, so an event for it patches nothing."""


class ProbeEvent:
    """A multi-probe event: defined in tracefs, armed for processes, and linked with a program.

    A kprobe is there for all processes as soon as anything opens its event.
    """

    holds_event_mutex = True
    own_program: OwnProgram | None = None

    def __init__(
        self, tracefs: Tracefs, program: int, name: str, places: Sequence[Place | FunctionPlace], cookie: int
    ) -> None:
        """Define the event. name: GROUP/EVENT. places: all in files, or one function. cookie: what the program is told
        at each hit.

        Raises TracefsRejectedError and leaves nothing.
        """
        self._tracefs = tracefs
        self._program = program
        self._name = name
        self._cookie = cookie
        self._perf_events: dict[int | None, int] = {}
        self._link_event: int | None = None
        self._link: int | None = None
        self._events_file = next((place.events_file for place in places), UPROBE_EVENTS)
        self._defined = False
        try:
            for place in places:
                tracefs.append_definition(place.definition(self._name), self._events_file)
                self._defined = True
            self._id = int(tracefs.read(f"events/{self._name}/id"))
        except BaseException:
            self.remove()
            raise

    def arm(self, pid: int | None) -> None:
        """Patch the sites in one process, or, if pid is None, in every present and future process.

        Raises OSError; ESRCH if there is no such process.
        """
        if self._link_event is None:
            self._link_event = self._open(_KERNEL_THREAD, ALL_CPUS)
        if self._link is None:
            self._link = link_perf_event(self._program, self._link_event, self._cookie)
        if pid not in self._perf_events:
            self._perf_events[pid] = (
                self._open(ALL_PROCESSES, online_cpus()[0])
                if pid is None
                else self._open(procfs.memory_holder(pid), ALL_CPUS)
            )

    def renew_in(self, pid: int) -> bool:
        """Keep the sites of one process patched, if it was armed by its pid and has another main thread, or none.

        An event is for a thread (`__uprobe_perf_filter` in kernel/trace/trace_uprobe.c takes the memory of hw.target),
        so it ends with that, though others of its process go on. The program runs once for a hit, however many of
        them there are. Return True. Raises OSError.
        """
        if (before := self._perf_events.get(pid)) is not None:
            # it may have ended
            with suppress(ProcessLookupError):
                self._perf_events[pid] = self._open(procfs.memory_holder(pid), ALL_CPUS)
                os.close(before)
        return True

    def _open(self, pid: int, cpu: int) -> int:
        return open_perf_event(PerfEventAttributes(type=_TYPE_TRACEPOINT, config=self._id, sample_period=1), pid, cpu)

    def missed(self, of_events: Callable[[], Mapping[str, int]]) -> int:
        """Return how many hits the kernel missed, which it counts for kernel functions alone. of_events: by event."""
        if self._events_file == UPROBE_EVENTS:
            return 0
        return of_events().get(self._name.rpartition("/")[2], 0)

    def unpatch(self) -> None:
        """Unpatch the sites in all processes, whose semaphores drop at once. Does not wait for a grace period."""
        while self._perf_events:
            try:
                _, descriptor = self._perf_events.popitem()
            except KeyError:
                # another thread took the last one
                return
            os.close(descriptor)

    def unpatch_in(self, pid: int) -> None:
        """Unpatch the sites in one process, if it was armed by its pid."""
        if (descriptor := self._perf_events.pop(pid, None)) is not None:
            os.close(descriptor)

    def disarm(self) -> None:
        """Unpatch, and wait until no hit runs the program any more, which another tracer's sleeping program can delay.

        Since Linux 6.13 the kernel holds no locks while it waits (perf_event_detach_bpf_prog).
        """
        self.unpatch()
        if self._link is not None:
            link, self._link = self._link, None
            os.close(link)

    def remove(self) -> None:
        """Disarm the event and delete its definition. Raises TracefsRejectedError."""
        self.disarm()
        if self._link_event is not None:
            link_event, self._link_event = self._link_event, None
            os.close(link_event)
        if self._defined:
            self._tracefs.append_definition(f"-:{self._name}", self._events_file)
            self._defined = False
