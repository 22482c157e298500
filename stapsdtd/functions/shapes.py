"""Types of values as a table without a BTF, by which whoever has the bytes of a value can print it.

    struct path { struct vfsmount *mnt; struct dentry *dentry; };

    0  8 bytes   a pointer
    1  16 bytes  struct path   mnt: 0 at bit 0, dentry: 0 at bit 64

A type comes behind those that it is made of, and nothing is behind a pointer, so the table ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from stapsdtd.btf.members import with_bits
from stapsdtd.btf.types import (
    VOID,
    Array,
    CType,
    Enum,
    Int,
    Member,
    Pointer,
    Record,
    TypeId,
    Types,
    Void,
    size_of,
    stripped,
)
from stapsdtd.functions.values import MAX_VALUE_BYTES

MAX_SHAPES = 4096
"""Of one table. Types beyond these are opaque."""

_POINTER: Final = Pointer(VOID)
_OPAQUE: Final = Void()

Shaped: TypeAlias = Int | Pointer | Enum | Array | Record | Void


@dataclass(frozen=True, slots=True)
class TypeShape:
    """size: in bytes; 0 for an array without an end.

    type: no typedef and nothing qualified. Its elements and members have numbers of the table instead of TypeIds; what
    a pointer points to is void. Void if it is opaque: a floating-point number, or beyond the limit.
    """

    size: int
    type: Shaped


class ShapeTable:
    """Collects the shapes of types, of several BTF as well. Shapes that are equal are one."""

    def __init__(self) -> None:
        self._numbers: dict[TypeShape, int] = {}
        self._seen: dict[tuple[Types, TypeId], int] = {}

    @property
    def shapes(self) -> tuple[TypeShape, ...]:
        return tuple(self._numbers)

    def add(self, types: Types, ident: TypeId) -> int:
        """Return the number of a type's shape. Members that begin behind MAX_VALUE_BYTES are left out.

        Raises BtfError.
        """
        number = self._seen.get((types, ident))
        if number is None:
            shape = TypeShape(size_of(types, ident), self._shaped(types, stripped(types, ident)))
            number = self._seen[types, ident] = self._numbers.setdefault(shape, len(self._numbers))
        return number

    def _shaped(self, types: Types, found: CType) -> Shaped:
        if len(self._numbers) >= MAX_SHAPES:
            return _OPAQUE
        match found:
            case Int() | Enum():
                return found
            case Pointer():
                return _POINTER
            case Array(element, count):
                return Array(TypeId(self.add(types, element)), count)
            case Record():
                return replace(found, members=tuple(self._member(types, each) for each in _shown(types, found)))
            case _:
                return _OPAQUE

    def _member(self, types: Types, member: Member) -> Member:
        return replace(with_bits(types, member), type=TypeId(self.add(types, member.type)))


def _shown(types: Types, record: Record) -> list[Member]:
    """Return the members without those that only fill bits, or lie where no value is fetched."""
    return [
        member
        for member in record.members
        if member.bit_offset < 8 * MAX_VALUE_BYTES and (member.name or isinstance(stripped(types, member.type), Record))
    ]
