"""What a client of HTTP/2 says first, and which requests it began (RFC 9113, sections 3.4, 4.1 and 5.1), looked at as
it passes by.

50 52 49 20 2a 20 48 54 54 50 2f 32 2e 30 0d 0a 0d 0a 53 4d 0d 0a 0d 0a   PRI * HTTP/2.0 ... SM ...
00 00 06   04   00   00 00 00 00   00 04 7f ff ff ff                      SETTINGS, 6 bytes
00 00 5c   01   04   00 00 00 01   00 07 3a 6d 65 74 68 6f 64 ...         HEADERS, END_HEADERS, stream 1
00 00 05   00   01   00 00 00 01   00 00 00 00 00                         DATA, END_STREAM, stream 1
length     type flags stream       payload
"""

from __future__ import annotations

import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_STREAM, _END_HEADERS = 1, 4
_STREAM = (1 << 31) - 1
_MOST_UNFINISHED = 1000
"""The server allows 256; whoever begins more has them looked at no further, and so they stay."""


class Opening:
    """is_greeting_over: preface and SETTINGS came. is_over: the headers of a first request did, too.

    unfinished: the numbers of requests that began, and whose last byte did not come; none is used twice.

    What is no HTTP/2 is never over; the gRPC server closes such a connection.
    """

    def __init__(self) -> None:
        self.is_greeting_over = False
        self.is_over = False
        self.unfinished: set[int] = set()
        self._has_no_body = False
        self._is_http2 = True
        self._preface = _PREFACE
        self._head = b""
        self._payload_left = 0

    def feed(self, data: bytes) -> None:
        """data: what came next, in whatever pieces."""
        expected, self._preface = self._preface[: len(data)], self._preface[len(data) :]
        self._is_http2 &= data.startswith(expected)
        data = data[len(expected) :]
        while data and self._is_http2 and len(self.unfinished) <= _MOST_UNFINISHED:
            data = self._feed_frame(data)

    def _feed_frame(self, data: bytes) -> bytes:
        """Answer what is behind the frame that goes on here."""
        if len(self._head) < _HEAD.size:
            missing = _HEAD.size - len(self._head)
            self._head += data[:missing]
            data = data[missing:]
            if len(self._head) < _HEAD.size:
                return b""
            high, low, *_ = _HEAD.unpack(self._head)
            self._payload_left = high << 16 | low
        passed = min(self._payload_left, len(data))
        self._payload_left -= passed
        if not self._payload_left:
            self._end_frame()
        return data[passed:]

    def _end_frame(self) -> None:
        _, _, kind, flags, stream = _HEAD.unpack(self._head)
        stream &= _STREAM
        self._head = b""
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
