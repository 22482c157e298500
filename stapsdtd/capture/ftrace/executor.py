"""Carries actions out in tracefs, and takes back what it did when one fails."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from stapsdtd.capture.ftrace.format import EventFormat
from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.plan.actions import Action, Define, Disable, Enable, Installed, Instance, Remove, undo
from stapsdtd.plan.events import EventSpec


@dataclass(slots=True)
class InstalledEvent:
    """An event that exists in the kernel; format is its fields' offsets, and the id its records carry."""

    name: str
    format: EventFormat
    enabled: set[Instance] = field(default_factory=set)
    touched: set[Instance] = field(default_factory=set)


class Executor:
    """Knows what is installed. Events are named GROUP/e0, e1, …, a name never used twice."""

    def __init__(self, tracefs: Tracefs, group: str) -> None:
        self._tracefs = tracefs
        self._group = group
        self._numbers = itertools.count()
        self.installed: dict[EventSpec, InstalledEvent] = {}

    def state(self) -> dict[EventSpec, Installed]:
        """Answer the state that `plan.changes` starts from."""
        return {
            spec: Installed(frozenset(event.enabled), frozenset(event.touched))
            for spec, event in self.installed.items()
        }

    def instance_gone(self, instance: Instance) -> None:
        """An instance was removed, so the events that it had touched no longer matter to it."""
        for event in self.installed.values():
            event.enabled.discard(instance)
            event.touched.discard(instance)

    def run(self, actions: Iterable[Action], file_path: str = "") -> None:
        """Do all or nothing. file_path reaches the object of Define actions. Raises TracefsRejectedError."""
        done: list[Action] = []
        try:
            for action in actions:
                self._do(action, file_path)
                done.append(action)
        except BaseException:
            for action in reversed(done):
                inverse = undo(action)
                if inverse is not None and not self._empties_rings(inverse):
                    # the first error is the one to report
                    with contextlib.suppress(TracefsRejectedError):
                        self._do(inverse, file_path)
            raise

    def _empties_rings(self, action: Action) -> bool:
        """Removing an event takes the records of others with it, where it was ever enabled (`plan.actions`)."""
        return isinstance(action, Remove) and bool(self.installed[action.spec].touched)

    def _do(self, action: Action, file_path: str) -> None:
        match action:
            case Define(spec):
                self._define(spec, file_path)
            case Enable(spec, instance):
                event = self.installed[spec]
                self._switch(event, instance, "1")
                event.enabled.add(instance)
                event.touched.add(instance)
            case Disable(spec, instance):
                event = self.installed[spec]
                self._switch(event, instance, "0")
                event.enabled.discard(instance)
            case Remove(spec):
                self._remove(self.installed[spec].name)
                del self.installed[spec]

    def _switch(self, event: InstalledEvent, instance: Instance, value: str) -> None:
        self._tracefs.write(f"instances/{instance}/events/{self._group}/{event.name}/enable", value)

    def _define(self, spec: EventSpec, file_path: str) -> None:
        name = f"e{next(self._numbers)}"
        defined = False
        try:
            for position, plan in enumerate(spec.sites):
                site = plan.capture.site
                semaphore = "" if site.semaphore_offset is None else f"({site.semaphore_offset:#x})"
                place = f"{file_path}:{site.site_offset:#x}{semaphore}"
                self._tracefs.append_definition(f"p:{self._group}/{name} {place} {spec.fetch_arguments(position)}")
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
