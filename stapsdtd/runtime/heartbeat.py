"""Detect a thread that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

_STALL_SECONDS = 15.0
"""Longer than a thread of the daemon may be busy."""


class Heartbeat:
    """Checks that a thread still runs the calls it is sent. Never blocks."""

    def __init__(self, name: str, ask: Callable[[], Future[None]], stall_seconds: float = _STALL_SECONDS) -> None:
        """ask: sends the thread a call that does nothing, and returns its future."""
        self._name = name
        self._ask = ask
        self._stall_seconds = stall_seconds
        self._asked_at = 0.0
        self._reply: Future[None] | None = None

    def problem(self) -> str | None:
        """Return what is wrong with the thread, in the same words while that does not change. Call this regularly."""
        now = time.monotonic()
        if self._reply is None or self._reply.done():
            self._asked_at, self._reply = now, self._ask()
        if self._reply.done():
            error = self._reply.exception()
            return str(error) if error else None
        if now - self._asked_at > self._stall_seconds:
            return f"{self._name} has been busy or hanging for more than {self._stall_seconds:g} s"
        return None
