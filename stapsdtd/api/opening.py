"""What a client of HTTP/2 says first (RFC 9113, sections 3.4 and 4.1), looked at as it passes by.

50 52 49 20 2a 20 48 54 54 50 2f 32 2e 30 0d 0a 0d 0a 53 4d 0d 0a 0d 0a   PRI * HTTP/2.0 ... SM ...
00 00 06   04   00   00 00 00 00   00 04 7f ff ff ff                      SETTINGS, 6 bytes
00 00 5c   01   04   00 00 00 01   00 07 3a 6d 65 74 68 6f 64 ...         HEADERS, END_HEADERS, stream 1
length     type flags stream       payload
"""

from __future__ import annotations

import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")
_HEADERS, _SETTINGS, _CONTINUATION = 1, 4, 9
_END_HEADERS = 4


class Opening:
    """is_greeting_over: preface and SETTINGS came. is_over: the headers of a first request did, too.

    What is no HTTP/2 is never over; the gRPC server closes such a connection.
    """

    def __init__(self) -> None:
        self.is_greeting_over = False
        self.is_over = False
        self._is_http2 = True
        self._preface = _PREFACE
        self._head = b""
        self._payload_left = 0

    def feed(self, data: bytes) -> None:
        """data: what came next, in whatever pieces."""
        expected, self._preface = self._preface[: len(data)], self._preface[len(data) :]
        self._is_http2 &= data.startswith(expected)
        data = data[len(expected) :]
        while data and self._is_http2 and not self.is_over:
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
        _, _, kind, flags, _ = _HEAD.unpack(self._head)
        self._head = b""
        self.is_greeting_over |= kind == _SETTINGS
        self.is_over |= kind in {_HEADERS, _CONTINUATION} and bool(flags & _END_HEADERS)
