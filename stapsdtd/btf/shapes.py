"""What the bytes of a value mean: its type, without names that only stand for others, and complete in itself.

    struct path { struct vfsmount *mnt; struct dentry *dentry; }
    RecordShape("struct", "path", 16, (MemberShape("mnt", 0, 0, PointerShape(8)), …))

Pointers lead nowhere, so that a shape has an end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class NumberShape:
    """size: in bytes. is_char: C's char, of which arrays are strings."""

    size: int
    is_signed: bool = False
    is_bool: bool = False
    is_char: bool = False


@dataclass(frozen=True, slots=True)
class PointerShape:
    size: int


@dataclass(frozen=True, slots=True)
class EnumShape:
    size: int
    is_signed: bool
    values: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """count: 0 if the array has no end of its own."""

    element: Shape
    count: int

    @property
    def size(self) -> int:
        return self.count * self.element.size


@dataclass(frozen=True, slots=True)
class MemberShape:
    """name: empty for an anonymous struct or union. bit_offset: from the beginning of the record. bits: the width of a
    bit field; 0 if it is none.
    """

    name: str
    bit_offset: int
    bits: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class RecordShape:
    keyword: Literal["struct", "union"]
    name: str
    size: int
    members: tuple[MemberShape, ...]


@dataclass(frozen=True, slots=True)
class OpaqueShape:
    """Bytes of which nothing is known."""

    size: int


Shape: TypeAlias = NumberShape | PointerShape | EnumShape | ArrayShape | RecordShape | OpaqueShape
