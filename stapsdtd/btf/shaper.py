"""Make shapes of types."""

from __future__ import annotations

from stapsdtd.btf.members import with_bits
from stapsdtd.btf.shapes import (
    ArrayShape,
    EnumShape,
    MemberShape,
    NumberShape,
    OpaqueShape,
    PointerShape,
    RecordShape,
    Shape,
)
from stapsdtd.btf.types import Array, Enum, Int, Pointer, Record, TypeId, Types, size_of, stripped

MAX_NODES = 4000
"""Of one shape. What is beyond is opaque."""

_CHAR = "char"


def shape_of(types: Types, ident: TypeId, max_bytes: int) -> Shape:
    """Return the shape of a type. Members that begin behind so many bytes are left out."""
    return _Shaper(types, max_bytes).shape(ident, 0)


class _Shaper:
    def __init__(self, types: Types, max_bytes: int) -> None:
        self._types = types
        self._max_bytes = max_bytes
        self._nodes = 0

    def shape(self, ident: TypeId, at: int) -> Shape:
        """at: where it begins in the value, in bytes."""
        self._nodes += 1
        size = size_of(self._types, ident)
        if self._nodes > MAX_NODES:
            return OpaqueShape(size)
        match stripped(self._types, ident):
            case Int() as number:
                return NumberShape(size, number.is_signed, number.is_bool, number.name == _CHAR)
            case Pointer():
                return PointerShape(size)
            case Enum() as enum:
                return EnumShape(size, enum.is_signed, enum.values)
            case Array(element, count):
                return ArrayShape(self.shape(element, at), count)
            case Record() as record:
                return RecordShape(record.keyword, record.name, size, self._members(record, at))
            case _:
                return OpaqueShape(size)

    def _members(self, record: Record, at: int) -> tuple[MemberShape, ...]:
        members = (with_bits(self._types, member) for member in record.members)
        return tuple(
            MemberShape(each.name, each.bit_offset, each.bits, self.shape(each.type, at + each.bit_offset // 8))
            for each in members
            if at + each.bit_offset // 8 < self._max_bytes
        )
