"""Arm a place of the trial of nops, in every process that maps its file: the trial's own one.

    a link to uprobes            Linux 6.6, CAP_BPF and CAP_PERFMON; gone with the daemon
    a tracefs event with perf    all kernels that allow perf_event_open; the next daemon removes what a killed one left

No program is run at a hit that does anything, and nobody reads the event's records.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

from stapsdtd.errors import KernelFeatureError, TracefsRejectedError
from stapsdtd.kernel import uprobe_links
from stapsdtd.kernel.host_calls import ARM
from stapsdtd.kernel.libbpf import load_trial
from stapsdtd.kernel.perf import ALL_PROCESSES, PerfEventAttributes, online_cpus, open_perf_event
from stapsdtd.kernel.places import Place
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.kernel.uprobe_links import UprobeLink

_TYPE_TRACEPOINT = 2


def arm_by_link(place: Place) -> Callable[[], None]:
    """See `nop_trial.Arm`."""
    program = load_trial(uprobe_links.PROGRAM_TYPE, uprobe_links.ATTACH_TYPE)
    try:
        link = UprobeLink(program, [place], [0])
        link.arm(None)
    finally:
        os.close(program)
    return link.remove


def arm_by_event(group: str, place: Place) -> Callable[[], None]:
    """See `nop_trial.Arm`. group: of the event, in tracefs."""
    name = f"{group}/nop_{place.offset:x}"
    with ExitStack() as undo:
        try:
            tracefs = Tracefs.locate()
            tracefs.append_definition(place.definition(name))
            undo.callback(_remove, tracefs, name)
            number = int(tracefs.read(f"events/{name}/id"))
            attributes = PerfEventAttributes(type=_TYPE_TRACEPOINT, config=number, sample_period=1)
            undo.callback(os.close, open_perf_event(attributes, ALL_PROCESSES, online_cpus()[0]))
        except TracefsRejectedError as error:
            raise ARM.refused(f"{place.path}:{place.offset:#x}", error.errno, str(error)) from error
        except KernelFeatureError as error:
            raise ARM.refused(f"{place.path}:{place.offset:#x}", errno.ENODEV, error.reason) from error
        return undo.pop_all().close


def _remove(tracefs: Tracefs, name: str) -> None:
    # the next daemon removes it otherwise
    with suppress(TracefsRejectedError):
        tracefs.append_definition(f"-:{name}")
