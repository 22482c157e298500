"""Ring-buffer pages made in code, as trace_pipe_raw gives them (include/linux/ring_buffer.h)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from stapsdtd.capture.ftrace.format import EventFormat, FieldPlace
from stapsdtd.plan.events import EventSpec
from stapsdtd.plan.fetch import SlotKind

PAGE_BYTES = 4096
HEADER = 16
ROOM = PAGE_BYTES - HEADER
EVENT_ID = 2326


@dataclass(frozen=True)
class Data:
    """A record; content is padded to words. large: its length in a word of its own, as records above 112 bytes have."""

    delta: int
    content: bytes
    large: bool = False


@dataclass(frozen=True)
class Extend:
    """A time extend: up to 59 bits of time to add."""

    delta: int


@dataclass(frozen=True)
class Stamp:
    """An absolute time stamp: the low 59 bits of the time."""

    time: int


@dataclass(frozen=True)
class Discarded:
    """A record that was taken back: padding with a length."""

    delta: int
    words: int


Piece = Data | Extend | Stamp | Discarded


def _header(kind: int, delta: int) -> bytes:
    return struct.pack("<I", kind | delta << 5)


def encoded(piece: Piece) -> bytes:
    match piece:
        case Data(delta, content, large):
            content = content.ljust(-(-max(len(content), 1) // 4) * 4, b"\0")
            if large or len(content) > 112:
                return _header(0, delta) + struct.pack("<I", 4 + len(content)) + content
            return _header(len(content) // 4, delta) + content
        case Extend(delta):
            return _header(30, delta & (1 << 27) - 1) + struct.pack("<I", delta >> 27)
        case Stamp(time):
            return _header(31, time & (1 << 27) - 1) + struct.pack("<I", time >> 27 & 0xFFFF_FFFF)
        case Discarded(delta, words):
            return _header(29, delta) + struct.pack("<I", 4 * words) + b"\xee" * (4 * (words - 1))


def page(time: int, *pieces: Piece, missed: bool = False, ends_in_padding: bool = False) -> bytes:
    body = b"".join(map(encoded, pieces))
    commit = len(body)
    if ends_in_padding:
        body += _header(29, 0)
        body = body.ljust(ROOM, b"\xdd")
        commit = ROOM
    assert len(body) <= ROOM
    return struct.pack("<QQ", time, commit | (missed << 31) | (missed << 30)) + body.ljust(ROOM, b"\xaa")


def decoded(data: bytes) -> list[tuple[int, int, bytes]]:
    """The simple way: (time, where the data begins, the data) of each record of a page."""
    time, commit = struct.unpack_from("<QQ", data)
    at, end = HEADER, HEADER + (commit & (1 << 30) - 1)
    records = []
    while at < end:
        (header,) = struct.unpack_from("<I", data, at)
        kind, delta = header & 31, header >> 5
        if kind == 29 and not delta:
            break
        word = struct.unpack_from("<I", data, at + 4)[0] if at + 8 <= len(data) else 0
        if kind == 31:
            time = time >> 59 << 59 | word << 27 | delta
            at += 8
            continue
        time += word << 27 | delta if kind == 30 else delta
        if kind == 30:
            at += 8
        elif kind == 29:
            at += 4 + word
        elif kind == 0:
            records.append((time, at + 8, data[at + 8 : at + 4 + word]))
            at += 4 + word
        else:
            records.append((time, at + 4, data[at + 4 : at + 4 + 4 * kind]))
            at += 4 + 4 * kind
    return records


class Kernel:
    """An event as the kernel lays it out: fields one behind the other without alignment, then strings and comm."""

    def __init__(self, event: EventSpec | str, event_id: int = EVENT_ID) -> None:
        """event: or the fetch arguments of its definition."""
        self.fetch_arguments = event if isinstance(event, str) else event.fetch_arguments(0)
        self.fields = {"common_type": FieldPlace(0, 2), "common_pid": FieldPlace(4, 4)}
        at = 16
        for field in self.fetch_arguments.split():
            name = field.partition("=")[0]
            kind = next((kind for kind in SlotKind if kind.letter == name[0] and name[1:].isdecimal()), None)
            size = {SlotKind.QUAD: 8, SlotKind.WORD: 2, SlotKind.BYTE: 1}.get(kind, 4) if kind else 4
            self.fields[name] = FieldPlace(at, size)
            at += size
        self.head = at
        self.format = EventFormat(event_id, self.fields)

    def record(self, position: int, tid: int = 1011, comm: bytes = b"app", **values: int | bytes | None) -> bytes:
        """What is not named is noise."""
        head = bytearray(b"\xcc" * self.head)
        tail = b""
        for name, value in {
            "common_type": self.format.id,
            "common_pid": tid,
            "site": position,
            "comm": comm,
            **values,
        }.items():
            place = self.fields[name]
            if isinstance(value, bytes) or value is None:
                data = b"" if value is None else value + b"\0"
                number = (len(data) << 16) | (self.head + len(tail))
                tail += data
            else:
                number = value % (1 << 8 * place.size)
            head[place.offset : place.offset + place.size] = number.to_bytes(place.size, "little")
        return bytes(head) + tail
