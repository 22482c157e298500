"""Types, which refer to each other by number, so that only those that somebody asks for are read.

[79507] FUNC_PROTO '(anon)' ret_type_id=1068 vlen=4
        'file' type_id=493
[493]   PTR '(anon)' type_id=492
[492]   STRUCT 'file' size=184 vlen=19
        'f_mode' type_id=1159 bits_offset=32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType, Protocol, TypeAlias

from stapsdtd.errors import StapsdtdError

TypeId = NewType("TypeId", int)
VOID = TypeId(0)


@dataclass(frozen=True, slots=True)
class Void:
    pass


@dataclass(frozen=True, slots=True)
class Int:
    """size: in bytes. bits: fewer than these in BTF of old compilers, for bit fields; bit_offset: where they begin."""

    name: str
    size: int
    bits: int
    bit_offset: int = 0
    is_signed: bool = False
    is_bool: bool = False


@dataclass(frozen=True, slots=True)
class Float:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Pointer:
    target: TypeId


@dataclass(frozen=True, slots=True)
class Array:
    """count: 0 if the array has no end of its own."""

    element: TypeId
    count: int


@dataclass(frozen=True, slots=True)
class Member:
    """name: empty for an anonymous struct or union. bit_offset: from the beginning of the record. bits: the width of a
    bit field; 0 if it is none.
    """

    name: str
    type: TypeId
    bit_offset: int
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A struct or a union. size: in bytes."""

    keyword: Literal["struct", "union"]
    name: str
    size: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Enum:
    name: str
    size: int
    is_signed: bool
    values: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """A struct or a union of which only the name is known."""

    keyword: Literal["struct", "union"]
    name: str


@dataclass(frozen=True, slots=True)
class Typedef:
    name: str
    target: TypeId


@dataclass(frozen=True, slots=True)
class Qualified:
    """word: `const`, `volatile`, `restrict`, or what a type tag stands for, such as `__user`."""

    word: str
    target: TypeId


@dataclass(frozen=True, slots=True)
class Parameter:
    """name: empty if the source has none."""

    name: str
    type: TypeId


@dataclass(frozen=True, slots=True)
class Prototype:
    result: TypeId
    parameters: tuple[Parameter, ...]
    is_variadic: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    prototype: TypeId


CType: TypeAlias = (
    Void | Int | Float | Pointer | Array | Record | Enum | Forward | Typedef | Qualified | Prototype | Function
)


class Types(Protocol):
    """A BTF."""

    @property
    def pointer_bytes(self) -> int: ...

    def get(self, ident: TypeId) -> CType:
        """Raises BtfError if there is no such type."""


class BtfError(StapsdtdError):
    """A BTF that is not as the kernel's documentation says."""


def stripped(types: Types, ident: TypeId) -> CType:
    """Return what typedefs and qualifiers stand for."""
    found = types.get(ident)
    while isinstance(found, Typedef | Qualified):
        found = types.get(found.target)
    return found


def size_of(types: Types, ident: TypeId) -> int:
    """Return the size in bytes; 0 for void, functions, arrays without an end and types that are only declared."""
    match stripped(types, ident):
        case Int() | Float() | Record() | Enum() as sized:
            return sized.size
        case Pointer():
            return types.pointer_bytes
        case Array(element, count):
            return count * size_of(types, element)
        case _:
            return 0


def is_char(found: CType) -> bool:
    """Report whether a type is `char`, arrays of which are shown as text: not `signed char` or `unsigned char`."""
    return isinstance(found, Int) and found.name == "char"


def is_text(types: Types, ident: TypeId) -> bool:
    """Report whether a type may be text: an array of bytes, such as `unsigned char d_iname[40]`."""
    found = stripped(types, ident)
    element = stripped(types, found.element) if isinstance(found, Array) else None
    return isinstance(element, Int) and element.size == 1 and not element.is_bool


def is_signed(types: Types, ident: TypeId) -> bool:
    match stripped(types, ident):
        case Int(is_signed=signed) | Enum(is_signed=signed):
            return signed
        case _:
            return False
