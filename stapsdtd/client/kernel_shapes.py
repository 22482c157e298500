"""What the bytes of a kernel function's value mean: its type, without typedefs and qualifiers.

    struct path  RecordShape("struct", "path", 16, members: mnt and dentry, PointerShape(8) both)

A shape that several others have is one object. Nothing is behind a pointer, so shapes end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stapsdtd.client.errors import ProtocolError
from stapsdtd.v1 import kernel_functions_pb2 as pb


@dataclass(frozen=True, slots=True)
class NumberShape:
    """size: in bytes. is_char: of text, which `char` is, but neither `signed char` nor `unsigned char`."""

    size: int
    signed: bool = False
    is_bool: bool = False
    is_char: bool = False


@dataclass(frozen=True, slots=True)
class PointerShape:
    size: int


@dataclass(frozen=True, slots=True)
class EnumShape:
    """enumerators: by name; the values of an unsigned enum are not negative."""

    size: int
    signed: bool
    enumerators: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """size: in bytes. count: of elements. Both are 0 for an array without an end."""

    size: int
    element: Shape
    count: int


@dataclass(frozen=True, slots=True)
class MemberShape:
    """name: empty for an anonymous struct or union. bit_offset: from the beginning of the record.

    bits: the width of a bit field; otherwise 0.
    """

    name: str
    shape: Shape
    bit_offset: int
    bits: int = 0


@dataclass(frozen=True, slots=True)
class RecordShape:
    """keyword: `struct` or `union`. name: empty for an anonymous one. size: in bytes.

    members: without those that begin so far behind that they are never fetched, at 2,048 bytes.
    """

    keyword: str
    name: str
    size: int
    members: tuple[MemberShape, ...]


@dataclass(frozen=True, slots=True)
class OpaqueShape:
    """Bytes whose meaning is not known, such as a floating-point number."""

    size: int


Shape: TypeAlias = NumberShape | PointerShape | EnumShape | ArrayShape | RecordShape | OpaqueShape


def shapes(messages: Iterable[pb.KernelType]) -> tuple[Shape, ...]:
    """Decode a table of types. Raises ProtocolError if one refers to itself, or to one behind it."""
    table: list[Shape] = []
    for message in messages:
        table.append(_shape(message, table))
    return tuple(table)


def shape_at(table: Sequence[Shape], position: int) -> Shape:
    """Raises ProtocolError."""
    if position >= len(table):
        raise ProtocolError(f"the server sent a reference to type {position} when it had sent {len(table)}")
    return table[position]


def enumerators_of(messages: Iterable[pb.Enumerator], *, signed: bool) -> dict[str, int]:
    """Return the values of an enum by name. signed: its type is."""
    # an unsigned value of 64 bits comes as the same bits with a sign
    wrap = 0 if signed else 1 << 64
    return {each.name: each.value + wrap if each.value < 0 else each.value for each in messages}


def _shape(message: pb.KernelType, table: Sequence[Shape]) -> Shape:
    size = message.size
    match message.WhichOneof("kind"):
        case "number":
            number = message.number
            return NumberShape(size, number.signed, number.boolean, number.character)
        case "pointer":
            return PointerShape(size)
        case "enumeration":
            return _enum(size, message.enumeration)
        case "array":
            return ArrayShape(size, shape_at(table, message.array.element), message.array.count)
        case "record":
            record = message.record
            members = (
                MemberShape(member.name, shape_at(table, member.type), member.offset, member.bits)
                for member in record.members
            )
            return RecordShape(record.keyword, record.name, size, tuple(members))
        case None:
            return OpaqueShape(size)


def _enum(size: int, message: pb.KernelEnum) -> EnumShape:
    return EnumShape(size, message.signed, enumerators_of(message.enumerators, signed=message.signed))
