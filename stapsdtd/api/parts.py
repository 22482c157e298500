"""Large answers, made in steps: fields of a message may come in pieces, so serialized parts are joined.

Items differ in size: a probe may have 30,000 sites, and a subscription 4,096 processes. So the time of a turn decides
how many of them a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

from stapsdtd.api import wire
from stapsdtd.runtime.slices import Turn

_T = TypeVar("_T")

_MESSAGE_BYTES = 1 << 18
"""Of one that is one of many; clients' libraries take 4 MiB by default."""


def serialized(field: int, items: Iterable[_T], message_of: Callable[[_T], Message]) -> Generator[None, None, bytes]:
    """Serialize items as a repeated field, given by its number: a message has all of them."""
    return b"".join((yield from _encoded(field, items, message_of)))


def one_of_many(field: int, items: Iterator[_T], message_of: Callable[[_T], Message]) -> Generator[None, None, bytes]:
    """Serialize the next items as a repeated field of a message of moderate size; return nothing if none are left."""
    return b"".join((yield from _encoded(field, items, message_of, _MESSAGE_BYTES)))


def _encoded(
    field: int, items: Iterable[_T], message_of: Callable[[_T], Message], most_bytes: int | None = None
) -> Generator[None, None, list[bytes]]:
    turn = Turn()
    parts = []
    size = 0
    for item in items:
        part = wire.delimited(field, message_of(item).SerializeToString())
        parts.append(part)
        size += len(part)
        if most_bytes is not None and size >= most_bytes:
            break
        if turn.is_over:
            yield
            turn.begin()
    return parts


def as_bytes(answer: Message | bytes) -> bytes:
    """Serialize an answer, unless it is already."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
