"""The messages between daemon and worker, and the checks of what a worker answers.

    request   1 byte, and by SCM_RIGHTS a descriptor, or two: that of the debug file
    answer    u64 length of what follows, little-endian | u8 status
              status 0, 2: the reason in UTF-8
              status 1:    the parts that `codec` makes of an object, as a msgpack array of byte strings

Whatever is wrong with an answer raises `RefusedError`. Every field is checked, so that a worker under an attacker's
control can only claim what some file could have contained.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated

from msgspec import DecodeError, Meta, msgpack

from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import (
    MAX_REASON_BYTES,
    SEMAPHORE_BYTES,
    Address,
    Argument,
    Constant,
    Memory,
    Operand,
    ParsedObject,
    Register,
    Unavailable,
)
from stapsdtd.runtime.text import escape
from stapsdtd.sandbox import codec
from stapsdtd.sandbox.codec import RefusedError

__all__ = [
    "LENGTH",
    "MAX_ANSWER_BYTES",
    "REQUEST",
    "ParserFailedError",
    "RefusedError",
    "decode",
    "encode",
    "encode_reason",
    "framed",
    "length_of",
]

REQUEST = b"P"
LENGTH = struct.Struct("<Q")
MAX_ANSWER_BYTES = 128 << 20

_UNREADABLE, _PARSED, _FAILED = b"\0", b"\1", b"\2"
_PARTS = msgpack.Decoder(Annotated[list[memoryview], Meta(max_length=codec.PARTS)])

_NUMBERS = frozenset({1, 2, 4, 8})
_FLOATS = frozenset({4, 8})
_SIZES: Mapping[type[Operand], range | frozenset[int]] = {
    Constant: _NUMBERS,
    Register: _NUMBERS,
    Memory: range(1, 4097),
    Address: _NUMBERS,
    Unavailable: range((1 << 20) + 1),
}
"""Sizes of the values such an operand can hold; arch/grammar.py makes operands of other sizes Unavailable."""


class ParserFailedError(ObjectUnreadableError):
    """Not the file but the parser has a defect, which somebody should hear of."""


def encode_reason(reason: str, *, failed: bool = False) -> list[bytes]:
    """Return an answer without an object. failed: because of a defect in the parser, not of the file."""
    return [_FAILED if failed else _UNREADABLE, reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]]


def framed(parts: Sequence[bytes]) -> list[bytes]:
    return [LENGTH.pack(sum(map(len, parts))), *parts]


def encode(parsed: ParsedObject) -> list[bytes]:
    """Return an answer in parts. Raises ObjectUnreadableError if the daemon would refuse it as too large."""
    return [_PARSED, msgpack.encode(codec.encode(parsed))]


def length_of(prefix: bytes) -> int:
    """Return the length of the answer after this prefix of LENGTH.size bytes. Raises RefusedError if it is too long."""
    length: int = LENGTH.unpack(prefix)[0]
    if not 0 < length <= MAX_ANSWER_BYTES:
        raise RefusedError(f"an answer of {length} bytes")
    return length


def decode(answer: bytes | bytearray, file_size: int) -> ParsedObject:
    """Return the object in an answer about a file of that many bytes.

    Raises RefusedError, ObjectUnreadableError if the answer says so, and nothing else.
    """
    status, told = answer[:1], memoryview(answer)[1:]
    if status == _UNREADABLE:
        raise ObjectUnreadableError(_reason(told))
    if status == _FAILED:
        raise ParserFailedError(f"the parser failed: {_reason(told)}")
    if status != _PARSED:
        raise RefusedError("no answer of a known kind")
    try:
        parts = _PARTS.decode(told)
    except DecodeError as error:
        raise RefusedError(str(error)) from error
    parsed = codec.decode(parts, _check_argument)
    _check_object(parsed, file_size)
    return parsed


def _reason(told: memoryview) -> str:
    if not 0 < len(told) <= MAX_REASON_BYTES:
        raise RefusedError(f"a reason of {len(told)} bytes")
    return escape(str(told, "utf-8", "replace"))


def _check_object(parsed: ParsedObject, file_size: int) -> None:
    """Check how fields relate to each other and to the file. Raises RefusedError."""
    sites = parsed.sites
    offsets = list(map(attrgetter("site_offset"), sites))
    semaphores = filter(None, map(attrgetter("semaphore_offset"), sites))
    if max(offsets, default=-1) >= file_size or max(semaphores, default=-SEMAPHORE_BYTES) + SEMAPHORE_BYTES > file_size:
        raise RefusedError("a site or a semaphore beyond the file's end")
    # the kernel refuses an event with the same site twice; offsets alone are cheaper to compare and mostly all differ
    probes = map(attrgetter("site_offset", "provider", "name"), sites)
    if len(set(offsets)) < len(sites) and len(set(probes)) < len(sites):
        raise RefusedError("a probe has the same site twice")
    places = {*offsets, None} if parsed.problems else set()
    if any(each.duplicates not in places for each in parsed.problems):
        raise RefusedError("a note that duplicates no site")
    if any(segment.offset + segment.size > file_size for segment in parsed.read_only):
        raise RefusedError("a segment beyond the file's end")


def _check_argument(argument: Argument) -> None:
    if not _fits(argument):
        raise RefusedError(f"an operand that no argument of {argument.size} bytes has")


def _fits(argument: Argument) -> bool:
    """Return whether the argument can have its operand, which consumers of arguments rely on."""
    size = argument.size
    if size not in _SIZES[type(argument.operand)]:
        return False
    match argument.operand:
        case Constant(value):
            low, high = (-(1 << 8 * size - 1), 1 << 8 * size - 1) if argument.signed else (0, 1 << 8 * size)
            return low <= value < high and not argument.is_float
        case Register(first_bit=first_bit):
            return (size == 1 or not first_bit) and (size in _FLOATS or not argument.is_float)
        case Memory(scale=scale):
            return scale in _NUMBERS
        case Address():
            return not argument.is_float
        case Unavailable():
            return True
