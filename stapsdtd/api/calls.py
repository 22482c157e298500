"""Calls whose end needs the control thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from stapsdtd.api.backend import Control


class OpenCalls:
    """Cleans up after each call. Runs on the API's event loop."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def cleanup(self, work: Callable[[], None]) -> AsyncIterator[None]:
        """Run work in the control thread when the call is over, however it ends."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            try:
                await self._control.run(work)
            finally:
                self._count -= 1
                if not self._count:
                    self._idle.set()

    async def finished(self) -> None:
        """Return when no call, cancelled ones included, has anything left to do in the control thread."""
        await self._idle.wait()
