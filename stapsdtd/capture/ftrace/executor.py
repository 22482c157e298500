"""Executes steps in tracefs, and undoes them if one fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from stapsdtd.capture.ftrace.format import EventFormat
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.events import EventSpec, Instance
from stapsdtd.plan.steps import Define, Disable, Enable, EventState, Remove, Step, undo

_HITS = re.compile(r"\s(\S+)\s+(\d+)$", re.MULTILINE)


@dataclass(slots=True)
class InstalledEvent:
    """An event that exists in the kernel. format: its fields' offsets, and the id in its records."""

    name: str
    format: EventFormat
    state: EventState = EventState.DEFINED


class Executor:
    """Installs and removes events, and keeps track of them.

    No name is used twice on the whole host, since uprobe_profile shows an event's name without its group.
    """

    def __init__(self, tracefs: Tracefs, group: str) -> None:
        self._tracefs = tracefs
        self._group = group
        self._serials = itertools.count()
        self.installed: dict[EventSpec, InstalledEvent] = {}

    def state(self) -> dict[EventSpec, EventState]:
        """Return what is installed, for `plan.steps.changes`."""
        return {spec: event.state for spec, event in self.installed.items()}

    def instance_gone(self, instance: Instance) -> None:
        """Note that an instance was removed, and with it the ring that removing its events would empty."""
        for spec, event in self.installed.items():
            if spec.instance == instance:
                event.state = EventState.DEFINED

    def hits(self, instance: Instance) -> int:
        """Return how often the events of an instance fired, by the kernel's count; exact once they are disabled."""
        names = {event.name for spec, event in self.installed.items() if spec.instance == instance}
        profile = _HITS.findall(self._tracefs.read("uprobe_profile"))
        return sum(int(count) for name, count in profile if name in names)

    def run(self, steps: Iterable[Step], file_path: str = "") -> None:
        """Execute all steps or none. file_path: opens the object of Define steps. Raises TracefsRejectedError."""
        done: list[Step] = []
        try:
            for step in steps:
                self._do(step, file_path)
                done.append(step)
        except BaseException:
            for step in reversed(done):
                self._undo(step)
            raise

    def _undo(self, step: Step) -> None:
        inverse = undo(step)
        if inverse is None:
            return
        if isinstance(inverse, Remove) and self.installed[inverse.spec].state is not EventState.DEFINED:
            return
        # the first error is the one to report
        with contextlib.suppress(TracefsRejectedError):
            self._do(inverse, "")

    def _do(self, step: Step, file_path: str) -> None:
        match step:
            case Define(spec):
                self._define(spec, file_path)
            case Enable(spec):
                self._switch(spec, "1")
                self.installed[spec].state = EventState.ENABLED
            case Disable(spec):
                self._switch(spec, "0")
                self.installed[spec].state = EventState.DISABLED
            case Remove(spec):
                try:
                    self._remove(self.installed[spec].name)
                except TracefsRejectedError as error:
                    if error.errno != errno.ENOENT:  # somebody emptied uprobe_events
                        raise
                del self.installed[spec]

    def _switch(self, spec: EventSpec, value: str) -> None:
        name = self.installed[spec].name
        self._tracefs.write(f"instances/{spec.instance}/events/{self._group}/{name}/enable", value)

    def _define(self, spec: EventSpec, file_path: str) -> None:
        name = f"e{next(self._serials)}_{self._group.removeprefix('stapsdtd_')}"
        defined = False
        try:
            for position, plan in enumerate(spec.sites):
                site = plan.capture.site
                semaphore = "" if site.semaphore_offset is None else f"({site.semaphore_offset:#x})"
                location = f"{file_path}:{site.site_offset:#x}{semaphore}"
                self._tracefs.append_definition(f"p:{self._group}/{name} {location} {spec.fetch_arguments(position)}")
                defined = True
            event_format = EventFormat.parse(self._tracefs.read(f"events/{self._group}/{name}/format"))
        except BaseException:
            if defined:
                with contextlib.suppress(TracefsRejectedError):
                    self._remove(name)
            raise
        self.installed[spec] = InstalledEvent(name, event_format)

    def _remove(self, name: str) -> None:
        self._tracefs.append_definition(f"-:{self._group}/{name}")
