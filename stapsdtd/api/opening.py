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

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER = struct.Struct(">BHBBI")
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _END_HEADERS = 1, 4
_STREAM_MASK = (1 << 31) - 1
_MAX_UNFINISHED = 1000
"""The server allows 256. A client that begins more than this is no longer followed, so they remain unfinished."""


class Opening:
    """The beginning of a client's HTTP/2 connection.

    is_greeting_over: whether the preface and SETTINGS were received.
    is_over: whether the headers of a first request were received, too.
    unfinished: stream ids of requests that began and have not ended; no id is used twice.

    The opening of a connection that does not speak HTTP/2 is never over; the gRPC server closes such a connection.
    """

    def __init__(self) -> None:
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
        while data and self._is_http2 and len(self.unfinished) <= _MAX_UNFINISHED:
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
        self._payload_left -= consumed
        if not self._payload_left:
            self._end_frame()
        return data[consumed:]

    def _end_frame(self) -> None:
        _, _, kind, flags, stream = _FRAME_HEADER.unpack(self._frame_header)
        stream &= _STREAM_MASK
        self._frame_header = b""
        self.is_greeting_over |= kind == _SETTINGS
        if kind == _HEADERS:
            self.unfinished.add(stream)
            self._has_no_body = bool(flags & _END_STREAM)
        if kind in {_HEADERS, _CONTINUATION} and flags & _END_HEADERS:
            self.is_over = True
            if self._has_no_body:
                self.unfinished.discard(stream)
        if kind == _RST_STREAM or (kind == _DATA and flags & _END_STREAM):
            self.unfinished.discard(stream)
