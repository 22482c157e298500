r"""Values of kernel functions as C would initialise them, and as JSON.

    struct path of 16 bytes              {.mnt = 0xffff888100a3c2a0, .dentry = 0xffff888104d1ec00}
    char comm[16], b"bash\0\0\0…"        "bash"
    struct task_struct, cut at 2,048     {.__state = 1, .stack = 0xffffc90000a54000, …, ...}

A value is taken apart into what each member and element has: the bytes of its own, as many as its type has or, where
the value was cut, fewer. A bit field gets the bytes that a member of its type with this value would have. Bytes are
little-endian, as on all machines whose kernel functions can be traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stapsdtd.client.kernel_shapes import (
    ArrayShape,
    EnumShape,
    MemberShape,
    NumberShape,
    OpaqueShape,
    PointerShape,
    RecordShape,
    Shape,
)
from stapsdtd.runtime.text import escape

_CUT = "..."
_FEWEST_FLAGS = 3
"""1 and 2 alone may as well be the first two of a row."""


def text_of(shape: Shape, value: int | bytes, *, shows_zeros: bool = False) -> str:
    """Return a value as C writes it: `{.f_mode = 29, .f_path = {.mnt = 0xffff888100000000}}`, `"bash"`, `TCP_CLOSE`.

    value: bytes, of which the last ones may be missing; or an int, which has the same bits. shows_zeros: show members
    too that are 0, and elements at the end that are. What is missing is shown as `...`.
    """
    return _Writer(shows_zeros).text(_Part(shape, _bytes_of(shape, value)))


def json_of(shape: Shape, value: int | bytes) -> object:
    """Return a value as text_of, for JSON: objects with all members, lists, strings, and names of enums.

    Pointers are `"0x…"`, and what is not understood is a string of hexadecimal digits, two for a byte. What is missing
    is None: the value itself, a member, or one element in place of all further ones. Members that are never
    fetched, which a shape does not have, are left out.
    """
    return _json(_Part(shape, _bytes_of(shape, value)))


def _bytes_of(shape: Shape, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value[: shape.size]
    return (value & ((1 << 8 * shape.size) - 1)).to_bytes(shape.size, "little")


@dataclass(frozen=True, slots=True)
class _Part:
    """A value or a part of one, and its bytes. Of one that is cut, the last bytes are missing."""

    shape: Shape
    data: bytes

    @property
    def is_cut(self) -> bool:
        return len(self.data) < self.shape.size

    @property
    def is_lost(self) -> bool:
        """Whether there is nothing to show of it: strings, lists and objects alone can be shown in part.

        What an array without an end has is behind the value.
        """
        match self.shape:
            case ArrayShape(count=0):
                return True
            case ArrayShape() | RecordShape() | OpaqueShape():
                return self.is_cut and not self.data
            case _:
                return self.is_cut


def _members(record: RecordShape, data: bytes) -> Iterator[tuple[str, _Part]]:
    """Yield what has a name. Members of anonymous structs and unions belong to the record itself, as in C."""
    for member in record.members:
        part = _Part(member.shape, _member_bytes(member, data))
        if member.name or not isinstance(member.shape, RecordShape):
            yield member.name, part
        else:
            yield from _members(member.shape, part.data)


def _member_bytes(member: MemberShape, data: bytes) -> bytes:
    if not member.bits:
        first = member.bit_offset // 8
        return data[first : first + member.shape.size]
    first, shift = divmod(member.bit_offset, 8)
    end = first + (shift + member.bits + 7) // 8
    if end > len(data):
        return b""
    number = int.from_bytes(data[first:end], "little") >> shift & ((1 << member.bits) - 1)
    if _is_signed(member.shape) and number >> (member.bits - 1):
        number -= 1 << member.bits
    return _bytes_of(member.shape, number)


def _elements(array: ArrayShape, data: bytes) -> list[_Part]:
    """Return the elements of which there is something."""
    size = array.element.size
    count = min(array.count, -(-len(data) // size)) if size else 0
    return [_Part(array.element, data[index * size : (index + 1) * size]) for index in range(count)]


def _is_signed(shape: Shape) -> bool:
    return isinstance(shape, NumberShape | EnumShape) and shape.signed


def _number(part: _Part) -> int:
    return int.from_bytes(part.data, "little", signed=_is_signed(part.shape))


def _is_string(array: ArrayShape) -> bool:
    return isinstance(array.element, NumberShape) and array.element.is_char


def _string(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _quoted(data: bytes) -> str:
    return '"' + escape(_string(data.replace(b"\\", rb"\\").replace(b'"', rb"\""))) + '"'


def _name(enum: EnumShape, number: int) -> str | None:
    return next((name for name, value in enum.enumerators.items() if value == number), None)


def _flags(enum: EnumShape, number: int) -> str | None:
    """Return the names of the bits of a number; None if the enum is not one of bits, or has no names for all."""
    flags = {value: name for name, value in enum.enumerators.items() if value}
    if number <= 0 or len(flags) < _FEWEST_FLAGS or any(value < 0 or value & (value - 1) for value in flags):
        return None
    if number & ~sum(flags):
        return None
    return " | ".join(flags[value] for value in sorted(flags) if number & value)


def _enum_text(enum: EnumShape, number: int) -> str:
    return escape(_name(enum, number) or _flags(enum, number) or str(number))


@dataclass(frozen=True, slots=True)
class _Writer:
    shows_zeros: bool

    def text(self, part: _Part) -> str:
        if part.is_lost:
            return _CUT
        match part.shape:
            case NumberShape(is_bool=True):
                return "true" if any(part.data) else "false"
            case NumberShape():
                return str(_number(part))
            case PointerShape():
                return f"{_number(part):#x}" if any(part.data) else "NULL"
            case EnumShape() as enum:
                return _enum_text(enum, _number(part))
            case ArrayShape() as array if _is_string(array):
                string, end, _ = part.data.partition(b"\0")
                return _quoted(string) + (_CUT if part.is_cut and not end else "")
            case ArrayShape() as array:
                return self._listed((self.text(each) for each in self._shown_elements(array, part)), part)
            case RecordShape() as record:
                return self._listed(self._shown_members(record, part), part)
            case OpaqueShape():
                return self._listed((f"{byte:#04x}" for byte in part.data), part)

    def _listed(self, shown: Iterator[str], part: _Part) -> str:
        return f"{{{', '.join([*shown, *([_CUT] if part.is_cut else [])])}}}"

    def _shown_elements(self, array: ArrayShape, part: _Part) -> list[_Part]:
        elements = [each for each in _elements(array, part.data) if not each.is_lost]
        while elements and not self.shows_zeros and not any(elements[-1].data):
            elements.pop()
        return elements

    def _shown_members(self, record: RecordShape, part: _Part) -> Iterator[str]:
        for name, member in _members(record, part.data):
            if not member.is_lost and (self.shows_zeros or any(member.data)):
                yield f".{escape(name)} = {self.text(member)}"


def _json(part: _Part) -> object:
    if part.is_lost:
        return None
    match part.shape:
        case NumberShape(is_bool=True):
            return any(part.data)
        case NumberShape():
            return _number(part)
        case PointerShape():
            return f"{_number(part):#x}"
        case EnumShape() as enum:
            number = _number(part)
            name = _name(enum, number)
            return number if name is None else name
        case ArrayShape() as array if _is_string(array):
            return _string(part.data.partition(b"\0")[0])
        case ArrayShape() as array:
            listed = [_json(each) for each in _elements(array, part.data) if not each.is_lost]
            return [*listed, None] if len(listed) < array.count and part.is_cut else listed
        case RecordShape() as record:
            return {name: _json(member) for name, member in _members(record, part.data)}
        case OpaqueShape():
            return part.data.hex()
