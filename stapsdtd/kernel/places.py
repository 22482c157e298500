"""Where the kernel patches programs, and itself."""

from __future__ import annotations

from typing import NamedTuple

UPROBE_EVENTS, KPROBE_EVENTS = "uprobe_events", "kprobe_events"
"""The files of tracefs that define events."""

_MOST_RETURNS = 512
"""How many calls of a function may await their return at a time; those beyond have no hit, and count as missed."""


class Place(NamedTuple):
    """An instruction of a file, by its offset there. semaphore_offset: None if no semaphore goes with it."""

    path: str
    offset: int
    semaphore_offset: int | None = None

    @property
    def events_file(self) -> str:
        return UPROBE_EVENTS

    def definition(self, name: str) -> str:
        """Return the line that defines an event there. name: GROUP/EVENT."""
        return f"p:{name} {self}"

    def __str__(self) -> str:
        """Return `PATH:0xOFFSET(0xREFCTR)`, as tracefs takes it (Documentation/trace/uprobetracer.rst)."""
        semaphore = "" if self.semaphore_offset is None else f"({self.semaphore_offset:#x})"
        return f"{self.path}:{self.offset:#x}{semaphore}"


class FunctionPlace(NamedTuple):
    """The entry of a kernel function, or its return. module: empty for the kernel itself."""

    module: str
    function: str
    is_return: bool

    @property
    def events_file(self) -> str:
        return KPROBE_EVENTS

    def definition(self, name: str) -> str:
        """As `Place.definition` (Documentation/trace/kprobetrace.rst)."""
        kind = f"r{_MOST_RETURNS}" if self.is_return else "p"
        return f"{kind}:{name} {self}"

    def __str__(self) -> str:
        return f"{self.module}:{self.function}" if self.module else self.function
