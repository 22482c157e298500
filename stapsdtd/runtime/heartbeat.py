"""Whether a thread still does what it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

_STALL_SECONDS = 15.0
"""Longer than what a thread of the daemon may have to do in one go: to parse a file takes 10 s at most."""


class Heartbeat:
    """Whether a thread still does what it is asked for. Nobody waits for it here."""

    def __init__(self, name: str, ask: Callable[[], Future[None]], stall_seconds: float = _STALL_SECONDS) -> None:
        """ask: has the thread do nothing, and answers when it has."""
        self._name = name
        self._ask = ask
        self._stall_seconds = stall_seconds
        self._asked = 0.0
        self._answer: Future[None] | None = None

    def problem(self) -> str | None:
        """Answer what is wrong with it, the same as long as it is the same; to be called every now and then."""
        now = time.monotonic()
        if self._answer is None or self._answer.done():
            self._asked, self._answer = now, self._ask()
        if self._answer.done():
            error = self._answer.exception()
            return str(error) if error else None
        if now - self._asked > self._stall_seconds:
            return f"{self._name} has been busy or hanging for more than {self._stall_seconds:g} s"
        return None
