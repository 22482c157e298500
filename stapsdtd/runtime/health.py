"""Whether events can be captured: looked at every other second, told to clients, and logged when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 2.0

Check = Callable[[], str | None]
"""Answers what is wrong, in the same words while it is the same. It waits for nobody, and is asked again and again."""


class Health:
    """Runs on the API's event loop. is_serving may be read in any thread."""

    def __init__(
        self, checks: Sequence[Check], tell: Callable[[str], Awaitable[None]], pause_seconds: float = _PAUSE_SECONDS
    ) -> None:
        """tell: is told of each change why nothing can be captured, or "" where it can."""
        self._checks = checks
        self._tell = tell
        self._pause_seconds = pause_seconds
        self._told = ""
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        return not self._told

    def start(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:  # noqa: BLE001 - the next look may fare better
                _log.exception("whether events can be captured cannot be told")
            await asyncio.sleep(self._pause_seconds)

    async def _look(self) -> None:
        problem = "; ".join(found for check in self._checks if (found := check()))
        if problem == self._told:
            return
        self._told = problem
        if problem:
            _log.error("NOT_SERVING: events cannot be captured: %s", problem)
        else:
            _log.info("SERVING: events can be captured again")
        await self._tell(problem)
