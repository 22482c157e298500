"""Protobuf's wire format, written by hand where building messages would cost too much.

A field is a tag followed by a varint, by 8 bytes, or by a length and that many bytes.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

VARINT, FIXED_64, DELIMITED = 0, 1, 2


def tag(field: int, wire_type: int) -> bytes:
    """field: less than 16."""
    return bytes([field << 3 | wire_type])


def head(field: int, number: int, wire_type: int = DELIMITED) -> bytes:
    """Return a field's tag and a varint that is not negative: its value, or the length of what follows."""
    head = [field << 3 | wire_type]
    while number > 0x7F:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    head.append(number)
    return bytes(head)


def delimited(field: int, content: bytes) -> bytes:
    return head(field, len(content)) + content


class Message:
    """Collects the fields of a message, without copying their contents until all is joined."""

    def __init__(self) -> None:
        self._chunks: list[bytes | memoryview] = []
        self._size = 0

    def add_number(self, field: int, number: int) -> None:
        self._add(head(field, number, VARINT))

    def add_bytes(self, field: int, content: bytes) -> None:
        self._add(head(field, len(content)))
        self._add(content)

    def add_array(self, field: int, content: npt.NDArray[Any]) -> None:
        """content: contiguous, in the byte order that is wanted. Must not change before `join`."""
        self._add(head(field, content.nbytes))
        self._chunks.append(content.data)
        self._size += content.nbytes

    def add_message(self, field: int, content: Message) -> None:
        self._add(head(field, content._size))
        self._chunks += content._chunks
        self._size += content._size

    def _add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)

    def join(self) -> bytes:
        return b"".join(self._chunks)
