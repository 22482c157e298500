"""Resolve values of functions: what type each has, and where it lies.

vfs_read(file->f_path.dentry)    argument 0 ─deref─► + 64: 8 bytes, struct dentry *
tcp_ack(sk->sk_shutdown)         argument 0 ─deref─► + 534: 1 byte, u8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import NoReturn

from stapsdtd.btf.declare import declare
from stapsdtd.btf.members import find_member, members_of
from stapsdtd.btf.types import (
    Array,
    CType,
    Enum,
    Forward,
    Member,
    Pointer,
    Prototype,
    Record,
    TypeId,
    Types,
    Void,
    is_signed,
    is_text,
    size_of,
    stripped,
)
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.selectors import FIELD, RESULT, IndexStep, MemberStep, ValuePath

MAX_VALUE_BYTES = 2048
"""Of a struct or an array. The rest is not fetched."""

_MAX_OFFSET = 1 << 31
"""Of an element behind a pointer; BPF programs add no larger constants."""
_SHOWN_NAMES = 8


@dataclass(frozen=True, slots=True)
class Location:
    """argument: its position, from 0; None for the result.

    offsets: in bytes, the first one in the argument itself, each further one in what the pointer at the one before
    points to. bit_offset, bits: of a bit field, from the first bit of the byte at the last offset; bits is 0 if it is
    none.
    """

    argument: int | None
    offsets: tuple[int, ...] = (0,)
    bit_offset: int = 0
    bits: int = 0

    def moved(self, count: int) -> Location:
        return replace(self, offsets=(*self.offsets[:-1], self.offsets[-1] + count))

    def followed(self) -> Location:
        """Return where the pointer that is here points to."""
        return replace(self, offsets=(*self.offsets, 0))


@dataclass(frozen=True, slots=True)
class ResolvedValue:
    """declared: the type as C writes it. size: in bytes; 0 for an array without an end. enumerators: of an enum.

    shape: the number of the type in what was found with the value; None unless asked for. is_composite: an array, a
    struct or a union. is_text: an array of bytes.
    """

    text: str
    type: TypeId
    declared: str
    size: int
    location: Location
    enumerators: tuple[tuple[str, int], ...] = ()
    is_signed: bool = False
    shape: int | None = None
    is_composite: bool = False
    is_text: bool = False


def resolve(types: Types, prototype: Prototype, path: ValuePath, text: str) -> ResolvedValue:
    """text: the selector that the path is part of. Raises InvalidArgumentError, with the column."""
    resolver = _Resolver(types, path, text)
    resolver.begin(prototype)
    for step in path.steps:
        resolver.take(step)
    return resolver.result()


class _Resolver:
    def __init__(self, types: Types, path: ValuePath, text: str) -> None:
        self._types = types
        self._path = path
        self._text = text
        self._shown = path.root
        self._type = TypeId(0)
        self._at = Location(None)

    def begin(self, prototype: Prototype) -> None:
        column, names = self._path.column, [parameter.name for parameter in prototype.parameters]
        if self._path.root == RESULT:
            if isinstance(stripped(self._types, prototype.result), Void):
                self._refuse(column, "the function returns nothing")
            self._type = prototype.result
        elif self._path.root in names:
            position = names.index(self._path.root)
            self._type, self._at = prototype.parameters[position].type, Location(position)
        else:
            shown = f"its arguments are {', '.join(filter(None, names))}" if any(names) else "it has no arguments"
            self._refuse(column, f"no argument is called {self._path.root}; {shown}")

    def take(self, step: MemberStep | IndexStep) -> None:
        if isinstance(step, IndexStep):
            self._take_element(step)
            self._shown += f"[{step.index}]"
        else:
            self._take_member(step)
            self._shown += f"{'->' if step.is_arrow else '.'}{step.name}"

    def result(self) -> ResolvedValue:
        at = self._at
        found = stripped(self._types, self._type)
        size = (at.bit_offset + at.bits + 7) // 8 if at.bits else size_of(self._types, self._type)
        enumerators = found.values if isinstance(found, Enum) else ()
        signed = is_signed(self._types, self._type)
        return ResolvedValue(
            self._path.text,
            self._type,
            self._declared(),
            size,
            at,
            enumerators,
            signed,
            is_composite=isinstance(found, Array | Record),
            is_text=is_text(self._types, self._type),
        )

    def _take_member(self, step: MemberStep) -> None:
        record = self._record(step)
        member = find_member(self._types, record, step.name)
        if member is None:
            self._refuse(step.column, f"{_title(record)} has no member {step.name}; {self._known(record, step.name)}")
        if step.is_arrow:
            self._at = self._at.followed()
        self._at = self._moved_to(member)
        self._type = member.type

    def _moved_to(self, member: Member) -> Location:
        at = self._at.moved(member.bit_offset // 8)
        return replace(at, bit_offset=member.bit_offset % 8, bits=member.bits) if member.bits else at

    def _record(self, step: MemberStep) -> Record:
        """Return the record that a step looks into."""
        found = stripped(self._types, self._type)
        if step.is_arrow:
            if not isinstance(found, Pointer):
                instead = "; use ." if isinstance(found, Record) else ""
                self._refuse(step.column, f"{self._shown} is no pointer but {self._declared()}{instead}")
            found = stripped(self._types, found.target)
        elif isinstance(found, Pointer):
            self._refuse(step.column, f"{self._shown} is a pointer; use ->")
        if isinstance(found, Forward):
            self._refuse(step.column, f"the kernel's BTF has no members of {found.keyword} {found.name}")
        if not isinstance(found, Record):
            kind = "does not point to a struct or union" if step.is_arrow else "is no struct or union"
            self._refuse(step.column, f"{self._shown} {kind} but is {self._declared()}")
        return found

    def _take_element(self, step: IndexStep) -> None:
        found = stripped(self._types, self._type)
        element = self._element(found, step)
        size = size_of(self._types, element)
        if size == 0:
            self._refuse(step.column, f"elements of {self._shown}, which is {self._declared()}, have no size")
        if step.index * size >= _MAX_OFFSET:
            self._refuse(step.column, f"element {step.index} is {step.index * size} bytes away, too far")
        at = self._at.followed() if isinstance(found, Pointer) else self._at
        self._type, self._at = element, at.moved(step.index * size)

    def _element(self, found: CType, step: IndexStep) -> TypeId:
        if isinstance(found, Pointer):
            return found.target
        if not isinstance(found, Array):
            self._refuse(step.column, f"{self._shown} is no array and no pointer but {self._declared()}")
        if found.count and step.index >= found.count:
            self._refuse(
                step.column, f"{self._shown} has {found.count} elements, the last of which is {found.count - 1}"
            )
        return found.element

    def _declared(self) -> str:
        return declare(self._types, self._type)

    def _known(self, record: Record, name: str) -> str:
        names = list(dict.fromkeys(member.name for member in members_of(self._types, record)))
        if near := get_close_matches(name, names, 3):
            return f"did you mean {', '.join(near)}?"
        return f"it has {', '.join(names[:_SHOWN_NAMES])}{', ...' if len(names) > _SHOWN_NAMES else ''}"

    def _refuse(self, column: int, reason: str) -> NoReturn:
        raise InvalidArgumentError(FIELD, reason, column, self._text)


def _title(record: Record) -> str:
    return f"{record.keyword} {record.name}" if record.name else f"the anonymous {record.keyword}"
