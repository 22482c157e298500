"""Decode the records of a BTF (include/uapi/linux/btf.h).

struct btf_type { u32 name_off; u32 info; u32 size_or_type; } and, by kind, what follows it
info: bits 0-15 vlen, 24-28 kind, 31 kind_flag
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Literal

from stapsdtd.btf.types import (
    Array,
    BtfError,
    CType,
    Enum,
    Float,
    Forward,
    Function,
    Int,
    Member,
    Parameter,
    Pointer,
    Prototype,
    Qualified,
    Record,
    Typedef,
    TypeId,
)

HEADER: Final = struct.Struct("=III")

_INT, _POINTER, _ARRAY, _STRUCT, _UNION, _ENUM, _FORWARD, _TYPEDEF = range(1, 9)
_VOLATILE, _CONST, _RESTRICT, FUNCTION, _PROTOTYPE = range(9, 14)
_FLOAT, _TYPE_TAG, _ENUM64 = 16, 18, 19

_ONE, _TWO, _THREE = (struct.Struct(f"={count}I") for count in (1, 2, 3))
_FIXED = {_INT: _ONE, _ARRAY: _THREE}
_REPEATED = {_STRUCT: _THREE, _UNION: _THREE, _ENUM: _TWO, _PROTOTYPE: _TWO, _ENUM64: _THREE}

_INT_SIGNED, _INT_BOOL = 1 << 0, 1 << 2
_QUALIFIERS = {_VOLATILE: "volatile", _CONST: "const", _RESTRICT: "restrict"}
_KEYWORDS: dict[int, Literal["struct", "union"]] = {_STRUCT: "struct", _UNION: "union"}

NameAt = Callable[[int], str]
"""Takes an offset into the strings."""


def kind_of(info: int) -> int:
    return info >> 24 & 0x1F


def body_bytes(info: int) -> int:
    """Return how many bytes follow the header; 0 for kinds that `decode` does not know."""
    kind = kind_of(info)
    if kind in _FIXED:
        return _FIXED[kind].size
    return _REPEATED[kind].size * (info & 0xFFFF) if kind in _REPEATED else 0


def decode(header: tuple[int, int, int], body: bytes, name_at: NameAt) -> CType:
    """Return the type of a record. Raises BtfError for a kind that is no type of C: a variable, a section, a tag."""
    name_offset, info, third = header
    kind, flag, name = kind_of(info), bool(info >> 31), name_at(name_offset)
    rows = list(_REPEATED[kind].iter_unpack(body)) if kind in _REPEATED else []
    match kind:
        case 1:  # BTF_KIND_INT
            return _int(name, third, _ONE.unpack(body)[0])
        case 2:  # BTF_KIND_PTR
            return Pointer(TypeId(third))
        case 3:  # BTF_KIND_ARRAY
            element, _, count = _THREE.unpack(body)
            return Array(TypeId(element), count)
        case 4 | 5:  # BTF_KIND_STRUCT, BTF_KIND_UNION
            members = tuple(_member(name_at(name), target, offset, flag) for name, target, offset in rows)
            return Record(_KEYWORDS[kind], name, third, members)
        case 6:  # BTF_KIND_ENUM
            values = ((name_at(name), _signed(value, 32) if flag else value) for name, value in rows)
            return Enum(name, third, flag, tuple(values))
        case 7:  # BTF_KIND_FWD
            return Forward("union" if flag else "struct", name)
        case 8:  # BTF_KIND_TYPEDEF
            return Typedef(name, TypeId(third))
        case 9 | 10 | 11:  # BTF_KIND_VOLATILE, BTF_KIND_CONST, BTF_KIND_RESTRICT
            return Qualified(_QUALIFIERS[kind], TypeId(third))
        case 12:  # BTF_KIND_FUNC
            return Function(name, TypeId(third))
        case 13:  # BTF_KIND_FUNC_PROTO
            return _prototype(third, [Parameter(name_at(name), TypeId(target)) for name, target in rows])
        case 16:  # BTF_KIND_FLOAT
            return Float(name, third)
        case 18:  # BTF_KIND_TYPE_TAG
            return Qualified(f"__{name}", TypeId(third))
        case 19:  # BTF_KIND_ENUM64
            wide = ((name_at(name), low | high << 32) for name, low, high in rows)
            return Enum(name, third, flag, tuple((name, _signed(value, 64) if flag else value) for name, value in wide))
        case _:
            raise BtfError(f"kind {kind} is no type of C")


def _int(name: str, size: int, encoded: int) -> Int:
    """encoded: bits 0-7 bits, 16-23 offset, 24-27 encoding."""
    encoding = encoded >> 24 & 0xF
    return Int(
        name, size, encoded & 0xFF, encoded >> 16 & 0xFF, bool(encoding & _INT_SIGNED), bool(encoding & _INT_BOOL)
    )


def _member(name: str, target: int, offset: int, is_packed: bool) -> Member:
    """is_packed: the record's kind_flag is set, so that the offset carries a bit field's width in its upper 8 bits."""
    if is_packed:
        return Member(name, TypeId(target), offset & 0xFFFFFF, offset >> 24)
    return Member(name, TypeId(target), offset)


def _prototype(result: int, parameters: list[Parameter]) -> Prototype:
    # `...` is a last parameter without name and type
    is_variadic = bool(parameters) and parameters[-1] == Parameter("", TypeId(0))
    return Prototype(TypeId(result), tuple(parameters[:-1] if is_variadic else parameters), is_variadic)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
