"""Check every two seconds whether events can be captured; publish and log changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 2.0

Check = Callable[[], str | None]
"""Returns what is wrong, in the same words while that does not change. Called periodically; must not block."""


class Health:
    """Runs on the API's event loop. is_serving may be read from any thread."""

    def __init__(
        self, checks: Sequence[Check], publish: Callable[[str], Awaitable[None]], pause_seconds: float = _PAUSE_SECONDS
    ) -> None:
        """publish: called at each change with the reason that events cannot be captured, or "" if they can."""
        self._checks = checks
        self._publish = publish
        self._pause_seconds = pause_seconds
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        return not self._problem

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                await self._check()
            except Exception:  # noqa: BLE001 - the next check may succeed
                _log.exception("health check failed; retrying in %g s", self._pause_seconds)
            await asyncio.sleep(self._pause_seconds)

    async def _check(self) -> None:
        problem = "; ".join(reason for check in self._checks if (reason := check()))
        if problem == self._problem:
            return
        self._problem = problem
        if problem:
            _log.error("NOT_SERVING: events cannot be captured: %s", problem)
        else:
            _log.info("SERVING: events can be captured again")
        await self._publish(problem)
