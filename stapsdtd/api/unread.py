"""Bounds the answers that clients ask for and do not read: gRPC keeps each until it is written, or the call ends."""

from __future__ import annotations

from collections import Counter

from stapsdtd.api.errors import Context
from stapsdtd.errors import LimitReachedError

MOST_BYTES = 32 << 20
"""Of one client: eight of the largest lists."""


class UnreadAnswers:
    """Runs on the API's event loop."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def check(self, client: str) -> None:
        """Raises LimitReachedError if so much waits for a client to read it that it may not ask for more."""
        if self._bytes[client] >= MOST_BYTES:
            waiting = self._bytes[client] >> 20
            text = f"{waiting} MiB of answers wait for {client} to read them; read or cancel them first"
            raise LimitReachedError(text, "unread_bytes")

    def hold(self, client: str, answer: bytes, context: Context) -> None:
        """Count an answer until its call is over."""
        size = len(answer)
        self._bytes[client] += size

        def release(_: object) -> None:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client]

        # the stubs describe another kind of callback
        context.add_done_callback(release)  # type: ignore[arg-type]
