"""HTTP/2 as no client that means well speaks it: frames that no call pays for."""

from __future__ import annotations

import gzip
import itertools
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from tests.api.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    greeting,
    headers,
    request,
)
from tests.siege.arena import Arena

_AT_ONCE = 500
_RESETS_AT_ONCE = 100
_FRAME = 16_000
"""No frame may be larger than 16,384 bytes."""
_PRIORITY = 2
_HEADER_TABLE_SIZE = 1
_CANCEL = 8
_INDEXED_NEWEST = b"\xbe"
_LITERAL_INDEXED, _LITERAL = b"\x40", b"\0"
_HELD = 30

Chunks = Callable[[], Iterator[bytes]]


def _text(value: bytes) -> bytes:
    """HPACK's string: a length with a prefix of 7 bits, then bytes as they are."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, coded = len(value) - 127, bytearray([127])
    while rest >= 128:
        coded.append(rest & 127 | 128)
        rest >>= 7
    return bytes(coded) + bytes([rest]) + value


def _streams() -> Iterator[int]:
    return itertools.count(1, 2)


def _block(block: bytes, stream: int = 1) -> Iterator[bytes]:
    """A header block in as many frames as it takes."""
    parts = [block[at : at + _FRAME] for at in range(0, len(block), _FRAME)]
    for number, part in enumerate(parts):
        yield frame(CONTINUATION if number else HEADERS, part, END_HEADERS if part is parts[-1] else 0, stream)


def _message(message: bytes, stream: int, *, compressed: bool = False, length: int | None = None) -> Iterator[bytes]:
    """A gRPC message in as many frames as it takes. length: what it claims to have."""
    data = struct.pack(">BI", compressed, len(message) if length is None else length) + message
    for at in range(0, len(data), _FRAME):
        part = data[at : at + _FRAME]
        yield frame(DATA, part, END_STREAM if at + _FRAME >= len(data) else 0, stream)


def _repeated(kind: int, payload: bytes, stream: int = 0) -> Chunks:
    return lambda: itertools.repeat(frame(kind, payload, 0, stream) * _AT_ONCE)


def _resets(call: Callable[[int], bytes]) -> Iterator[bytes]:
    """Begin calls and give them up at once."""
    reset = struct.pack(">I", _CANCEL)
    streams = _streams()
    while True:
        some = itertools.islice(streams, _RESETS_AT_ONCE)
        yield b"".join(call(stream) + frame(RST_STREAM, reset, 0, stream) for stream in some)


def _headers_alone(stream: int) -> bytes:
    return frame(HEADERS, headers("ListProbes"), END_HEADERS, stream)


def _whole_call(stream: int) -> bytes:
    return request("ListProbes", b"", stream)


def _endless_headers() -> Iterator[bytes]:
    yield frame(HEADERS, headers("ListProbes"), 0, 1)
    yield from itertools.repeat(frame(CONTINUATION, (_LITERAL + _text(b"xxxxx") + _text(b"yyyyy")) * 1000, 0, 1))


def _empty_continuations() -> Iterator[bytes]:
    yield frame(HEADERS, headers("ListProbes"), 0, 1)
    yield from itertools.repeat(frame(CONTINUATION, b"", 0, 1) * _AT_ONCE)


def _huge_headers() -> Iterator[bytes]:
    field = _LITERAL + _text(b"foo") + _text(b"z" * 60_000)
    for stream in _streams():
        yield from _block(headers("ListProbes") + field * 20, stream)


def _hpack_bomb() -> Iterator[bytes]:
    """An entry of the dynamic table that a byte names again, 15,000 times a frame."""
    entry = _LITERAL_INDEXED + _text(b"foo") + _text(b"z" * 3900)
    streams = _streams()
    yield frame(HEADERS, headers("ListProbes") + entry, END_HEADERS, next(streams))
    for stream in streams:
        yield frame(HEADERS, headers("ListProbes") + _INDEXED_NEWEST * 15_000, END_HEADERS, stream)


def _gzip_bomb() -> Iterator[bytes]:
    body = gzip.compress(b"\x0a\x00" * (32 << 20))
    for stream in _streams():
        yield frame(HEADERS, headers("Subscribe", [("grpc-encoding", "gzip")]), END_HEADERS, stream)
        yield from _message(body, stream, compressed=True)


def _huge_length() -> Iterator[bytes]:
    for stream in _streams():
        yield frame(HEADERS, headers("Subscribe"), END_HEADERS, stream)
        yield from _message(b"x" * 100, stream, length=0xFFFFFFFF)


def _varint(number: int) -> bytes:
    coded = bytearray()
    while number >= 128:
        coded.append(number & 127 | 128)
        number >>= 7
    return bytes([*coded, number])


def _deep_message() -> Iterator[bytes]:
    """Messages within messages, as deep as 200 KB can say."""
    message = b""
    while len(message) < 200_000:
        message = b"\x12" + _varint(len(message)) + message
    for stream in _streams():
        yield frame(HEADERS, headers("Subscribe"), END_HEADERS, stream)
        yield from _message(message, stream)


@dataclass(frozen=True, slots=True)
class _Hammering:
    """chunks: of one connection, which the attacker opens again when it is closed. reads: what the server says."""

    chunks: Chunks
    reads: bool = True
    connections: int = 2

    def __call__(self, arena: Arena) -> None:
        def work() -> None:
            with arena.connection(reads=self.reads) as connection:
                connection.sendall(greeting())
                arena.done["connections"] += 1
                for chunk in self.chunks():
                    if not arena.goes_on:
                        return
                    connection.sendall(chunk)
                    arena.done["sends"] += 1

        arena.on_sockets(self.connections, work)


def _brief(said: Callable[[], bytes], arena: Arena) -> None:
    """Connect, say something and go, as often as possible."""

    def work() -> None:
        with arena.connection(reads=False) as connection:
            connection.sendall(said())
        arena.done["connections"] += 1

    arena.on_sockets(2, work)


def _held(said: bytes, arena: Arena) -> None:
    """More connections than the role allows, on which nothing more is said, nor read."""

    def work() -> None:
        with ExitStack() as stack:
            try:
                for _ in range(_HELD):
                    stack.enter_context(arena.connection(reads=False)).sendall(said)
                    arena.done["connections"] += 1
            finally:
                time.sleep(min(1.0, arena.seconds_left))

    arena.on_sockets(2, work)


def _unread_calls() -> bytes:
    details = b"\x18\x01"
    streams = itertools.islice(_streams(), 90)
    return greeting() + b"".join(request("ListProbes", details, stream) for stream in streams)


_SMALL_TABLE = struct.pack(">HI", _HEADER_TABLE_SIZE, 4096)

ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    "frames_rapid_reset": _Hammering(lambda: _resets(_headers_alone)),
    "frames_rapid_reset_of_calls": _Hammering(lambda: _resets(_whole_call)),
    "frames_pings": _Hammering(_repeated(PING, b"12345678")),
    "frames_pings_unread": _Hammering(_repeated(PING, b"12345678"), reads=False),
    "frames_settings": _Hammering(_repeated(SETTINGS, _SMALL_TABLE)),
    "frames_settings_unread": _Hammering(_repeated(SETTINGS, _SMALL_TABLE), reads=False),
    "frames_window_updates": _Hammering(_repeated(WINDOW_UPDATE, struct.pack(">I", 1))),
    "frames_priorities": _Hammering(_repeated(_PRIORITY, struct.pack(">IB", 3, 16), 5)),
    "frames_endless_headers": _Hammering(_endless_headers),
    "frames_empty_continuations": _Hammering(_empty_continuations),
    "frames_huge_headers": _Hammering(_huge_headers),
    "frames_hpack_bomb": _Hammering(_hpack_bomb, connections=8),
    "frames_gzip_bomb": _Hammering(_gzip_bomb),
    "frames_huge_length": _Hammering(_huge_length),
    "frames_deep_message": _Hammering(_deep_message),
    "frames_garbage": partial(_brief, lambda: os.urandom(4000)),
    "frames_connections": partial(_brief, lambda: b""),
    "frames_greetings": partial(_brief, greeting),
    "frames_idle": partial(_held, greeting()),
    "frames_unread": partial(_held, _unread_calls()),
}
