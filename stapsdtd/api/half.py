"""One end of a relayed connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from stapsdtd.api.opening import Opening


class Half(asyncio.BufferedProtocol):
    """Writes what it reads to the other end, no faster than that end accepts it.

    lost: done when this end is closed.
    all_halves: contains this end while it is open.
    opening: is fed what is read. Once it has a problem, this end is aborted, and nothing is passed on.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        buffer: memoryview,
        all_halves: set[Half],
        at_end: Callable[[], None] = lambda: None,
        opening: Opening | None = None,
    ) -> None:
        self.other: Half | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = buffer
        self._all_halves = all_halves
        self._at_end = at_end
        self._opening = opening
        self._early_data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._all_halves.add(self)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._all_halves.discard(self)
        self._at_end()
        self.lost.set_result(None)

    def get_buffer(self, size: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        # copied, since Python 3.12 and later keep a reference to it until it is written
        data = bytes(self._buffer[:count])
        if self._opening is not None:
            self._opening.feed(data)
            if self._opening.problem:
                self.transport.abort()
                return
        if self.other is not None:
            self.other.write(data)
        else:
            # pausing earlier, in connection_made, would have no effect
            self._early_data += data
            self.transport.pause_reading()

    def connect_to(self, other: Half) -> None:
        """Write what is read to other, beginning with what was read already."""
        self.other = other
        self.transport.resume_reading()
        # after resuming, since this write may have to pause reading again
        other.write(self._early_data)
        self._early_data = b""

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close once everything written was sent."""
        # asyncio's TLS transport cannot be closed twice, nor aborted after that
        if not self.transport.is_closing():
            self.transport.close()

    def abort(self) -> None:
        if not self.lost.done():
            self.transport.abort()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()
