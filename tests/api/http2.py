"""HTTP/2 as no client that means well speaks it: frames by hand, over any connection."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MOST = (1 << 31) - 1
_INITIAL_WINDOW_SIZE, _USUAL_WINDOW = 4, 65535
_SERVICE = "stapsdtd.v1.StapsdtService"


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def greeting() -> bytes:
    """With room for all that a server may ever want to send, so that nothing but the connection holds it back."""
    window = struct.pack(">HI", _INITIAL_WINDOW_SIZE, MOST)
    return PREFACE + frame(SETTINGS, window) + frame(WINDOW_UPDATE, struct.pack(">I", MOST - _USUAL_WINDOW))


def fields(call: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{_SERVICE}/{call}"),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]


def headers(call: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """HPACK, each field a literal that is not indexed."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in [*fields(call), *more])


def request(call: str, message: bytes = b"", stream: int = 1) -> bytes:
    body = frame(DATA, struct.pack(">BI", 0, len(message)) + message, END_STREAM, stream)
    return frame(HEADERS, headers(call), END_HEADERS, stream) + body


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value.encode()


def frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Kind, flags and payload of each that the server sends, until it closes the connection."""
    with connection.makefile("rb") as said:
        while head := said.read(9):
            yield head[3], head[4], said.read(int.from_bytes(head[:3], "big"))
