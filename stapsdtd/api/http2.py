"""HTTP/2's frames and error codes (RFC 9113), and the last frame of a connection that the daemon gives up.

50 52 49 20 2a 20 48 54 54 50 2f 32 2e 30 0d 0a 0d 0a 53 4d 0d 0a 0d 0a   PRI * HTTP/2.0 ... SM ...
00 00 06   04   00   00 00 00 00   00 04 7f ff ff ff                      SETTINGS, 6 bytes
00 00 5c   01   04   00 00 00 01   00 07 3a 6d 65 74 68 6f 64 ...         HEADERS, END_HEADERS, stream 1
00 00 05   00   01   00 00 00 01   00 00 00 00 00                         DATA, END_STREAM, stream 1
length     type flags stream       payload
"""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = struct.Struct(">BHBBI")
"""The upper 8 and the lower 16 bits of the length, type, flags, stream id with a reserved bit."""
STREAM_MASK = (1 << 31) - 1
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 0, 1, 3, 4, 7, 9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x4, 0x8, 0x20
_GOAWAY_PAYLOAD = struct.Struct(">II")


class ErrorCode(IntEnum):
    """RFC 9113, section 7."""

    PROTOCOL_ERROR = 0x1
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Http2Error(Exception):
    """Why the connection of a client has to be closed."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class SentFrames:
    """Follows the frames that a client is sent, to know where one more may follow."""

    def __init__(self) -> None:
        self._has_begun = False
        self._header = b""
        self._payload_left = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes sent, which need not end with a frame."""
        at = 0
        while at < len(data):
            if self._payload_left:
                skipped = min(self._payload_left, len(data) - at)
                self._payload_left -= skipped
                at += skipped
                continue
            missing = FRAME_HEADER.size - len(self._header)
            self._header += data[at : at + missing]
            at += missing
            if len(self._header) == FRAME_HEADER.size:
                self._payload_left, self._header = int.from_bytes(self._header[:3], "big"), b""
                self._has_begun = True

    def goaway(self, error: Http2Error, last_stream: int) -> bytes:
        """Return what tells the client why the connection is closed; nothing in the middle of a frame.

        last_stream: the last request that may have been answered.
        """
        if self._header or self._payload_left:
            return b""
        # a server's first frame has to be SETTINGS
        settings = b"" if self._has_begun else FRAME_HEADER.pack(0, 0, SETTINGS, 0, 0)
        payload = _GOAWAY_PAYLOAD.pack(last_stream, error.code) + str(error).encode()
        return settings + FRAME_HEADER.pack(0, len(payload), GOAWAY, 0, 0) + payload
