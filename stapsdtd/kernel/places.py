"""Where the kernel patches programs."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """An instruction of a file, by its offset there. semaphore_offset: None if no semaphore goes with it."""

    path: str
    offset: int
    semaphore_offset: int | None = None

    def __str__(self) -> str:
        """Return `PATH:0xOFFSET(0xREFCTR)`, as tracefs takes it (Documentation/trace/uprobetracer.rst)."""
        semaphore = "" if self.semaphore_offset is None else f"({self.semaphore_offset:#x})"
        return f"{self.path}:{self.offset:#x}{semaphore}"
