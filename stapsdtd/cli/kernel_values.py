"""Values of the kernel as C's initializers and as JSON.

    {.f_mode = 29, .f_path = {.mnt = 0xffff888100a1c020, .dentry = 0xffff888100b1c000}, .f_flags = 32768}

Members that are zero are left out of the text, and so are the last elements of an array that are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stapsdtd.btf.shapes import ArrayShape, EnumShape, NumberShape, OpaqueShape, PointerShape, RecordShape
from stapsdtd.cli.render import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stapsdtd.btf.shapes import MemberShape, Shape

_CUT = "..."
_SHORTEST_TEXT, _SPACE, _TILDE = 2, 0x20, 0x7E
_ORDER: Final = "little"
"""Of all machines whose calling convention is known."""


def text_of(shape: Shape, value: int | bytes, *, shows_zeros: bool = False) -> str:
    """value: as events carry it, a number or the first bytes of what is larger."""
    return _Text(shows_zeros=shows_zeros).of(shape, _bytes(shape, value))


def json_of(shape: Shape, value: int | bytes) -> object:
    """Return what stands for a value in JSON: None for what was cut off, and for pointers strings."""
    return _json(shape, _bytes(shape, value))


def _bytes(shape: Shape, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    # of a record that is passed in a register, the register is larger
    return (value % (1 << 64)).to_bytes(8, _ORDER)[: max(shape.size, 1)]


class _Text:
    def __init__(self, *, shows_zeros: bool) -> None:
        self._shows_zeros = shows_zeros

    def of(self, shape: Shape, data: bytes) -> str:
        match shape:
            case ArrayShape(NumberShape(is_char=True)):
                return quote(data.partition(b"\0")[0]) + (_CUT if len(data) < shape.size and 0 not in data else "")
            case ArrayShape(NumberShape(size=1, is_bool=False)) if _is_text(data):
                return quote(data.partition(b"\0")[0])
            case ArrayShape(element):
                return self._array(shape, element, data)
            case RecordShape():
                parts = [self._member(member, data) for member in shape.members if self._is_shown(member, data)]
                return f"{{{', '.join([*parts, *([_CUT] if len(data) < shape.size else [])])}}}"
            case _:
                return _CUT if len(data) < shape.size else self._leaf(shape, data)

    def _leaf(self, shape: Shape, data: bytes) -> str:
        number = _number(shape, data)
        match shape:
            case PointerShape():
                return hex(number) if number else "NULL"
            case NumberShape(is_bool=True) if number in {0, 1}:
                return "true" if number else "false"
            case EnumShape():
                return str(_enumerator(shape, number))
            case OpaqueShape():
                return quote(data)
            case _:
                return str(number)

    def _array(self, shape: ArrayShape, element: Shape, data: bytes) -> str:
        parts = list(_elements(element, data, shape.count))
        is_cut = len(data) < shape.size
        while parts and not self._shows_zeros and not is_cut and not any(parts[-1]):
            parts.pop()
        texts = [self.of(element, part) for part in parts]
        return f"{{{', '.join([*texts, *([_CUT] if is_cut else [])])}}}"

    def _is_shown(self, member: MemberShape, data: bytes) -> bool:
        part = _part(member, data)
        return part is not None and (self._shows_zeros or any(part))

    def _member(self, member: MemberShape, data: bytes) -> str:
        text = self.of(member.shape, _part(member, data) or b"")
        if member.name:
            return f".{member.name} = {text}"
        return text[1:-1] if isinstance(member.shape, RecordShape) else text


def _json(shape: Shape, data: bytes) -> object:
    match shape:
        case ArrayShape(NumberShape(is_char=True)):
            return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")
        case ArrayShape(element):
            whole: list[object] = [_json(element, part) for part in _elements(element, data, shape.count)]
            return whole + [None] * (shape.count - len(whole))
        case RecordShape():
            return dict(_json_members(shape, data))
        case _ if len(data) < shape.size:
            return None
        case PointerShape():
            return hex(_number(shape, data))
        case NumberShape(is_bool=True):
            return bool(_number(shape, data))
        case EnumShape():
            return _enumerator(shape, _number(shape, data))
        case OpaqueShape():
            return data.hex()
        case _:
            return _number(shape, data)


def _json_members(shape: RecordShape, data: bytes) -> Iterator[tuple[str, object]]:
    for member in shape.members:
        part = _part(member, data)
        if not member.name and isinstance(member.shape, RecordShape):
            yield from _json_members(member.shape, part or b"")
        elif member.name:
            yield member.name, None if part is None else _json(member.shape, part)


def _elements(element: Shape, data: bytes, count: int) -> Iterator[bytes]:
    """Yield those that are whole."""
    size = element.size
    for at in range(count if size else 0):
        if (at + 1) * size <= len(data):
            yield data[at * size : (at + 1) * size]


def _part(member: MemberShape, data: bytes) -> bytes | None:
    """Return a member's bytes, those of a bit field as a number of its type; None if they were cut off."""
    first, bit = divmod(member.bit_offset, 8)
    if not member.bits:
        part = data[first : first + member.shape.size]
        is_record = isinstance(member.shape, RecordShape | ArrayShape)
        return part if len(part) == member.shape.size or (part and is_record) else None
    last = first + (bit + member.bits + 7) // 8
    if last > len(data):
        return None
    number = int.from_bytes(data[first:last], _ORDER) >> bit & (1 << member.bits) - 1
    if getattr(member.shape, "is_signed", False) and number >> (member.bits - 1):
        number -= 1 << member.bits
    return (number % (1 << 8 * member.shape.size)).to_bytes(member.shape.size, _ORDER)


def _is_text(data: bytes) -> bool:
    """Report whether bytes are a string, as names of files are, which the kernel has as unsigned char."""
    text, end, _ = data.partition(b"\0")
    return bool(end) and len(text) >= _SHORTEST_TEXT and all(_SPACE <= byte <= _TILDE for byte in text)


def _number(shape: Shape, data: bytes) -> int:
    return int.from_bytes(data, _ORDER, signed=getattr(shape, "is_signed", False))


def _enumerator(shape: EnumShape, number: int) -> str | int:
    """Return a value's name, names of flags that it consists of, or the number."""
    names = {value: name for name, value in reversed(shape.values)}
    if number in names:
        return names[number]
    flags = [value for value in names if value > 0 and not value & (value - 1) and number & value]
    is_union = number > 0 and sum(flags) == number and all(not value & (value - 1) for value in names if value > 0)
    return " | ".join(names[value] for value in sorted(flags)) if is_union else number
