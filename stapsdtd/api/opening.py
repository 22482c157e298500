"""Follows an HTTP/2 client's frames: its connection preface and the requests it began (RFC 9113, sections 3.4, 4.1 and
5.1).

50 52 49 20 2a 20 48 54 54 50 2f 32 2e 30 0d 0a 0d 0a 53 4d 0d 0a 0d 0a   PRI * HTTP/2.0 ... SM ...
00 00 06   04   00   00 00 00 00   00 04 7f ff ff ff                      SETTINGS, 6 bytes
00 00 5c   01   04   00 00 00 01   00 07 3a 6d 65 74 68 6f 64 ...         HEADERS, END_HEADERS, stream 1
00 00 05   00   01   00 00 00 01   00 00 00 00 00                         DATA, END_STREAM, stream 1
length     type flags stream       payload
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from stapsdtd.api.header_blocks import MAX_BLOCK_BYTES, fragment

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = struct.Struct(">BHBBI")
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _END_HEADERS = 1, 4
_KIND_AT = 3
_TOO_LONG = f"a request's headers have more than {MAX_BLOCK_BYTES} bytes"
_STREAM_MASK = (1 << 31) - 1
_MAX_UNFINISHED = 1000
"""The server allows 256. A client that begins more than this is no longer followed."""


class Opening:
    """The beginning of a client's HTTP/2 connection.

    is_greeting_over: whether the preface and SETTINGS were received.
    is_over: whether the headers of a first request were received, too.
    unfinished: stream ids of requests that began and have not ended; no id is used twice.
    problem: why nothing more of it, the last bytes fed included, may reach the gRPC server; empty if it may.
    why_not_headers: as `HeaderBlocks.why_not`; None if header blocks are not read.

    The opening of a connection that does not speak HTTP/2 is never over; the gRPC server closes such a connection.
    """

    def __init__(self, why_not_headers: Callable[[bytes], str] | None = None) -> None:
        self.problem = ""
        self._why_not_headers = why_not_headers
        # the fragments of a header block whose last one has not come, and the present frame's payload
        self._block: bytes | None = None
        self._payload = b""
        self.is_greeting_over = False
        self.is_over = False
        self.unfinished: set[int] = set()
        self._has_no_body = False
        self._is_http2 = True
        self._preface = _PREFACE
        self._frame_header = b""
        self._payload_left = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes received, which need not end with a frame."""
        expected, self._preface = self._preface[: len(data)], self._preface[len(data) :]
        self._is_http2 &= data.startswith(expected)
        data = data[len(expected) :]
        while data and self._is_http2 and not self.problem:
            data = self._feed_frame(data)

    def _feed_frame(self, data: bytes) -> bytes:
        """Consume data up to the end of the current frame, and return the rest."""
        if len(self._frame_header) < _FRAME_HEADER.size:
            missing = _FRAME_HEADER.size - len(self._frame_header)
            self._frame_header += data[:missing]
            data = data[missing:]
            if len(self._frame_header) < _FRAME_HEADER.size:
                return b""
            high, low, *_ = _FRAME_HEADER.unpack(self._frame_header)
            self._payload_left = high << 16 | low
        consumed = min(self._payload_left, len(data))
        if self._why_not_headers is not None and self._is_of_headers():
            self._payload += data[:consumed]
            if len(self._payload) > MAX_BLOCK_BYTES:
                self.problem = _TOO_LONG
                return b""
        self._payload_left -= consumed
        if not self._payload_left:
            self._end_frame()
        return data[consumed:]

    def _end_frame(self) -> None:
        _, _, kind, flags, stream = _FRAME_HEADER.unpack(self._frame_header)
        stream &= _STREAM_MASK
        self._frame_header = b""
        self.is_greeting_over |= kind == _SETTINGS
        if self._why_not_headers is not None:
            self._end_fragment(kind, flags, self._why_not_headers)
        if kind == _HEADERS:
            self.unfinished.add(stream)
            if len(self.unfinished) > _MAX_UNFINISHED:
                self.problem = f"more than {_MAX_UNFINISHED} requests began and did not end"
            self._has_no_body = bool(flags & _END_STREAM)
        if kind in {_HEADERS, _CONTINUATION} and flags & _END_HEADERS:
            self.is_over = True
            if self._has_no_body:
                self.unfinished.discard(stream)
        if kind == _RST_STREAM or (kind == _DATA and flags & _END_STREAM):
            self.unfinished.discard(stream)

    def _is_of_headers(self) -> bool:
        return self._frame_header[_KIND_AT] in {_HEADERS, _CONTINUATION}

    def _end_fragment(self, kind: int, flags: int, why_not: Callable[[bytes], str]) -> None:
        """Take a fragment of a header block. No other frame may come between two of them."""
        if kind not in {_HEADERS, _CONTINUATION} and self._block is None:
            return
        if (kind == _CONTINUATION) != (self._block is not None):
            self.problem = "a request's headers are interrupted"
            return
        payload, self._payload = self._payload, b""
        self._block = (self._block or b"") + (fragment(flags, payload) if kind == _HEADERS else payload)
        if len(self._block) > MAX_BLOCK_BYTES:
            self.problem = _TOO_LONG
        elif flags & _END_HEADERS:
            self.problem = why_not(self._block)
            self._block = None
