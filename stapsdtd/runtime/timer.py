"""A timer that runs once for any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Runs on an event loop."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Schedule the work, unless it is scheduled already."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._run)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self) -> None:
        self._handle = None
        self._work()
