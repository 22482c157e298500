"""Removes what killed daemons left in tracefs, and nothing else."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from stapsdtd.capture.names import Owner
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.places import KPROBE_EVENTS, UPROBE_EVENTS
from stapsdtd.kernel.tracefs import Tracefs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """How many instances and events were removed. failures: the kernel's messages about those that could not be."""

    instances: int
    events: int
    failures: tuple[str, ...]


def clean_up(tracefs: Tracefs) -> Cleaned:
    """Remove what dead daemons left: first the instances, since an event enabled in one cannot be removed."""
    failures: list[str] = []
    instances = 0
    for name in tracefs.instances():
        owner = Owner.of(name)
        if owner is not None and owner.is_dead():
            try:
                tracefs.remove_instance(name)
                instances += 1
            except TracefsRejectedError as error:
                failures.append(str(error))
    events = 0
    of_functions = [(KPROBE_EVENTS, *each) for each in tracefs.kprobe_events()]
    for events_file, group, event in [*((UPROBE_EVENTS, *each) for each in tracefs.uprobe_events()), *of_functions]:
        owner = Owner.of(group)
        if owner is not None and owner.is_dead():
            try:
                tracefs.append_definition(f"-:{group}/{event}", events_file)
                events += 1
            except TracefsRejectedError as error:
                failures.append(str(error))
    return Cleaned(instances, events, tuple(failures))


def remove_leftovers(tracefs: Tracefs) -> None:
    """As clean_up, at the start of a daemon, which logs what was there."""
    removed = clean_up(tracefs)
    if removed.events or removed.instances:
        _log.info("removed %d events and %d instances that a killed daemon left", removed.events, removed.instances)
    for failure in removed.failures:
        _log.warning("cannot remove what a killed daemon left: %s", failure)
