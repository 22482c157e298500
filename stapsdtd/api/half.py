"""One end of a relayed connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from stapsdtd.api.frames import FrameReader
from stapsdtd.api.http2 import Http2Error, SentFrames

_LONGEST_WAIT_SECONDS = 1.0


class Half(asyncio.BufferedProtocol):
    """Writes what it reads to the other end, no faster than that end accepts it.

    lost: done when this end is closed.
    all_halves: contains this end while it is open.
    sent: the frames written to this end.
    """

    transport: asyncio.Transport

    def __init__(self, buffer: memoryview, all_halves: set[Half], at_end: Callable[[], None] = lambda: None) -> None:
        self.other: Half | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = SentFrames()
        self._buffer = buffer
        self._all_halves = all_halves
        self._at_end = at_end
        self._reader: FrameReader | None = None
        self._refuse: Callable[[Http2Error], None] | None = None
        self._unsent = b""
        self._charge: Callable[[float], float] = lambda _: 0.0
        self._is_held = self._is_refused = self._is_waiting = False

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
        if self.other is not None and not self._unsent:
            self._pass_on(data)
        else:
            # pausing earlier, in connection_made, would have no effect
            self._unsent += data
            self.transport.pause_reading()

    def connect_to(
        self,
        other: Half,
        reader: FrameReader,
        refuse: Callable[[Http2Error], None],
        charge: Callable[[float], float],
    ) -> None:
        """Write what is read to other, beginning with what was read already.

        reader: reads it before. refuse: is called once with its error, from when on nothing more is read. charge: is
        told how much processor time that took, and returns for how long nothing more is to be read.
        """
        self.other, self._reader, self._refuse, self._charge = other, reader, refuse, charge
        self._continue()

    def _pass_on(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._reader is not None and self._refuse is not None:
            begin = time.thread_time()
            try:
                self._unsent = data[self._reader.feed(data) :]
            except Http2Error as error:
                self._is_refused = True
                self.transport.pause_reading()
                self._refuse(error)
                return
            if seconds := self._charge(time.thread_time() - begin):
                self._is_waiting = True
                self.transport.pause_reading()
                asyncio.get_running_loop().call_later(min(seconds, _LONGEST_WAIT_SECONDS), self._read_on)
            if self._unsent:
                data = data[: len(data) - len(self._unsent)]
                self.transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._continue)
        if self.other is not None:
            self.other.write(data)

    def _read_on(self) -> None:
        self._is_waiting = False
        self._resume_reading()

    def _continue(self) -> None:
        """Pass on what is left, which took too long for one turn, then read on."""
        if self.transport.is_closing():
            return
        data, self._unsent = self._unsent, b""
        # resuming before, since writing may have to pause reading again
        self._resume_reading()
        self._pass_on(data)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.sent.feed(data)
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
            self.other.hold(is_held=True)

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.hold(is_held=False)

    def hold(self, *, is_held: bool) -> None:
        """Stop or resume reading, since the other end takes no more at present, or takes more again."""
        self._is_held = is_held
        if is_held:
            self.transport.pause_reading()
        else:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if not (self._is_held or self._unsent or self._is_refused or self._is_waiting):
            self.transport.resume_reading()
