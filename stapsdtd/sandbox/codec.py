"""The codec of `model.ParsedObject`: tables, whose columns are derived from the model's annotations.

    Site("app", "tick", 0x10, …), Site("app", "tock", 0x20, …)

    texts  ["app", "tick", "tock"]
    Site   provider [0, 0]   name [1, 2]   site_offset [0x10, 0x20]   …

Each class is a table and each of its fields a column. Texts, operands and lists of arguments are sent once, and columns
hold indices into them. A table is an array of columns in msgpack. msgspec decodes it by the types and bounds of the
fields, and checks an array's length before allocating it. `protocol` checks how fields relate to each other and to the
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from msgspec import DecodeError, Meta, msgpack

from stapsdtd.elf.notes import MAX_ARGUMENTS
from stapsdtd.elf.read_only import MAX_READ_ONLY_SEGMENTS
from stapsdtd.elf.sites import MAX_NOTES
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import MAX_PROBLEMS, Argument, Operand, ParsedObject, Problem, ReadOnlySegment, Site

_MAX_TEXTS = 3 * MAX_NOTES
_MAX_TEXTS_BYTES = 64 << 20
"""As much as MAX_NOTES_BYTES allows for notes."""

MAX_DISTINCT_ARGUMENTS = 1 << 18
"""Operands with a symbol differ from site to site. libjvm.so has some 700."""

_MAX_LISTED_ARGUMENTS = 4 * MAX_NOTES

_Index = Annotated[int, Meta(ge=0)]
_T = TypeVar("_T")


class RefusedError(Exception):
    """A worker's answer that no file could have caused; the text says why."""


def encode(parsed: ParsedObject) -> list[bytes]:
    """Return the parts of a message. Raises ObjectUnreadableError if the daemon would refuse it as too large."""
    # by identity: the parser makes one list per argument string, and comparing them takes as long as sending
    lists = {id(site.arguments): site.arguments for site in parsed.sites}
    list_indices = {of: index for index, of in enumerate(lists)}
    arguments, texts = _Indices[Argument](), _Indices[str]()
    listed = [arguments(argument) for in_list in lists.values() for argument in in_list]
    distinct = dict.fromkeys(argument.operand for argument in arguments)
    operands = [[operand for operand in distinct if type(operand) is table.kind] for table in _OPERANDS]
    operand_indices = {operand: index for index, operand in enumerate(chain.from_iterable(operands))}
    index_of: dict[Any, Callable[[Any], int]] = {
        str: texts,
        Operand: operand_indices.__getitem__,
        _ARGUMENTS.list_type: lambda arguments: list_indices[id(arguments)],
        **{table.list_type: lambda _objects: 0 for table in _COLLECTIONS.values()},
    }
    tables = [
        *(table.encode(of_kind, index_of) for table, of_kind in zip(_OPERANDS, operands, strict=True)),
        _ARGUMENTS.encode(list(arguments), index_of),
        *(table.encode(getattr(parsed, field), index_of) for field, table in _COLLECTIONS.items()),
        _OBJECT.encode([parsed], index_of),
    ]
    parts = [_TEXTS.encode([texts]), _LISTS.encode([[len(in_list) for in_list in lists.values()], listed]), *tables]
    if len(parts[0]) > _MAX_TEXTS_BYTES:
        raise ObjectUnreadableError(f"it has texts of {len(parts[0])} bytes, more than {_MAX_TEXTS_BYTES}")
    return parts


def decode(parts: Sequence[memoryview], check: Callable[[Argument], None]) -> ParsedObject:
    """Return the object. Raises RefusedError and nothing else; check raises it for an impossible argument."""
    if len(parts) != PARTS:
        raise RefusedError(f"{len(parts)} parts, not {PARTS}")
    texts, lists, *tables = parts
    remaining = iter(tables)
    targets: dict[Any, Sequence[Any]] = {str: _decode_texts(texts)}
    operands = targets[Operand] = list[Operand]()
    for table in _OPERANDS:
        operands += table.decode(next(remaining), targets)
        if len(operands) > MAX_DISTINCT_ARGUMENTS:
            raise RefusedError(f"more operands than {MAX_DISTINCT_ARGUMENTS}")
    arguments = _ARGUMENTS.decode(next(remaining), targets)
    for argument in arguments:
        check(argument)
    targets[_ARGUMENTS.list_type] = _decode_lists(lists, arguments)
    for table in _COLLECTIONS.values():
        targets[table.list_type] = (table.decode(next(remaining), targets),)
    found = _OBJECT.decode(next(remaining), targets)
    if len(found) != 1:
        raise RefusedError(f"{len(found)} objects")
    return found[0]


class _Indices(dict[_T, int]):
    """Numbers values in the order they come, equal ones alike."""

    def __call__(self, value: _T) -> int:
        return self.setdefault(value, len(self))


def _generic(kind: Any, *arguments: Any) -> Any:
    """Return `kind[arguments]` for types known only at run time, which mypy does not accept as an expression."""
    return kind.__class_getitem__(arguments)


class _Wire:
    """A msgpack array of exactly these arrays: the type of their elements, their maximum length, their name."""

    def __init__(self, *arrays: tuple[Any, int, str]) -> None:
        self._bounds = [(most, plural) for _, most, plural in arrays]
        types = [Annotated[_generic(list, element), Meta(max_length=most)] for element, most, _ in arrays]
        self._decoder = msgpack.Decoder(_generic(tuple, *types))

    def encode(self, arrays: Sequence[Iterable[Any]]) -> bytes:
        lists = list(map(list, arrays))
        for values, (most, plural) in zip(lists, self._bounds, strict=True):
            if len(values) > most:
                raise ObjectUnreadableError(f"it has {len(values)} {plural}, more than {most}")
        return msgpack.encode(lists)

    def decode(self, part: memoryview) -> list[list[Any]]:
        try:
            return list(self._decoder.decode(part))
        except DecodeError as error:
            raise RefusedError(f"{self._bounds[0][1]}: {error}") from error
        except UnicodeDecodeError as error:
            raise RefusedError("a text that is not valid UTF-8") from error


class _Column(NamedTuple):
    """A field: its type on the wire and, if that is an index, what into. rule: of the texts it refers to."""

    name: str
    wire: Any
    target: Any = None
    rule: Meta | None = None


def column_of(name: str, hint: Any) -> _Column:
    if hint == Operand or get_origin(hint) is tuple:
        return _Column(name, _Index, hint)
    is_optional = NoneType in get_args(hint)
    kind = next(option for option in get_args(hint) if option is not NoneType) if is_optional else hint
    base, *rules = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if base is not bool and not rules:
        raise TypeError(f"the model gives no bounds for {name}")
    if base is str:
        return _Column(name, _Index | None if is_optional else _Index, str, rules[0])
    return _Column(name, hint)


class _Table(Generic[_T]):
    """All objects of one class of the model; plural names them in errors."""

    def __init__(self, kind: type[_T], most: int, plural: str) -> None:
        self.kind = kind
        self.list_type = _generic(tuple, kind, ...)
        self._plural = plural
        self.columns = [column_of(*field) for field in get_type_hints(kind, include_extras=True).items()]
        self._wire = _Wire(*((column.wire, most, plural) for column in self.columns))

    def encode(self, objects: Sequence[_T], index_of: Mapping[Any, Callable[[Any], int]]) -> bytes:
        return self._wire.encode([self._values(column, objects, index_of) for column in self.columns])

    @staticmethod
    def _values(
        column: _Column, objects: Sequence[_T], index_of: Mapping[Any, Callable[[Any], int]]
    ) -> Iterable[int | None]:
        values = map(attrgetter(column.name), objects)
        if column.target is None:
            return values
        index = index_of[column.target]
        return (None if value is None else index(value) for value in values)

    def decode(self, part: memoryview, targets: Mapping[Any, Sequence[Any]]) -> tuple[_T, ...]:
        values = self._wire.decode(part)
        if len(set(map(len, values))) > 1:
            raise RefusedError(f"the columns of {self._plural} differ in length")
        for number, column in enumerate(self.columns):
            if column.target is not None:
                # in place, which frees each column of indices before the next one is resolved
                values[number] = _targets_of(column, values[number], targets[column.target])
        return tuple(map(self.kind, *values))


def _targets_of(column: _Column, indices: Sequence[int | None], targets: Sequence[Any]) -> list[Any]:
    try:
        found = [None if index is None else targets[index] for index in indices]
    except IndexError as error:
        raise RefusedError(f"{column.name}: an index out of {len(targets)}") from error
    if column.rule is not None:
        _check_texts(column.name, {text for text in found if text is not None}, column.rule)
    return found


def _check_texts(name: str, texts: Iterable[str], rule: Meta) -> None:
    least, most, pattern = rule.min_length or 0, rule.max_length or _MAX_TEXTS_BYTES, rule.pattern
    for text in texts:
        if not least <= (len(text) if text.isascii() else len(text.encode())) <= most:
            raise RefusedError(f"{name}: a text shorter than {least} bytes or longer than {most}")
        if pattern and not re.fullmatch(pattern, text):
            raise RefusedError(f"{name}: the text {text[:40]!r} does not match {pattern}")


_OPERANDS = [_Table(kind, MAX_DISTINCT_ARGUMENTS, "operands") for kind in get_args(Operand)]
_ARGUMENTS = _Table(Argument, MAX_DISTINCT_ARGUMENTS, "arguments")
_COLLECTIONS = {
    "sites": _Table[Any](Site, MAX_NOTES, "sites"),
    "problems": _Table[Any](Problem, MAX_PROBLEMS, "problems"),
    "read_only": _Table[Any](ReadOnlySegment, MAX_READ_ONLY_SEGMENTS, "read only"),
}
"""The fields of ParsedObject that hold a whole table."""
_OBJECT = _Table(ParsedObject, 1, "objects")
_TEXTS = _Wire((str, _MAX_TEXTS, "texts"))
_LISTS = _Wire(
    (Annotated[int, Meta(ge=0, le=MAX_ARGUMENTS)], MAX_NOTES, "lists of arguments"),
    (_Index, _MAX_LISTED_ARGUMENTS, "listed arguments"),
)
TABLES = (*_OPERANDS, _ARGUMENTS, *_COLLECTIONS.values(), _OBJECT)
PARTS = 2 + len(TABLES)
"""Texts, lists of arguments and the tables."""


def _decode_texts(part: memoryview) -> list[str]:
    """Return the texts, which must all differ."""
    if len(part) > _MAX_TEXTS_BYTES:
        raise RefusedError(f"texts of {len(part)} bytes")
    (texts,) = _TEXTS.decode(part)
    if any("\0" in text for text in texts):
        raise RefusedError("a text with a NUL")
    if len(set(texts)) != len(texts):
        raise RefusedError("the same text twice")
    return texts


def _decode_lists(part: memoryview, arguments: Sequence[Argument]) -> list[tuple[Argument, ...]]:
    lengths, indices = _LISTS.decode(part)
    listed = _targets_of(_Column("arguments", _Index), indices, arguments)
    if sum(lengths) != len(listed):
        raise RefusedError("lists of arguments that are not as long as they claim")
    return [tuple(listed[end - length : end]) for end, length in zip(accumulate(lengths), lengths, strict=True)]
