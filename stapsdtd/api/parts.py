"""Large answers, made in steps: fields of a message may come in pieces, so serialized parts are joined."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

_T = TypeVar("_T")

ITEMS_PER_STEP = 128
"""Some 2 ms."""


def serialized(items: Sequence[_T], message_of: Callable[[Sequence[_T]], Message]) -> Generator[None, None, bytes]:
    """Serialize a message with many items in its repeated fields. message_of: returns one with some of them."""
    parts = []
    for first in range(0, len(items), ITEMS_PER_STEP):
        parts.append(message_of(items[first : first + ITEMS_PER_STEP]).SerializeToString())
        yield
    return b"".join(parts)


def as_bytes(answer: Message | bytes) -> bytes:
    """Serialize an answer, unless it is already."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
