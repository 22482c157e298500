"""What crosses the sockets, and the daemon's disbelief.

    request   1 byte, and by SCM_RIGHTS a descriptor, or two: that of the debug file
    answer    u64 length of what follows | u8 status
              status 0, 2: the reason in UTF-8
              status 1:    u32 counts (_Counts) | u32 lengths of all texts | the texts in UTF-8 | columns

All numbers are little-endian, and a column is one array. The columns are those of operands (kinds, then all their
cells), of arguments, of lists of arguments, of sites and of problems, in the order of `_COLUMNS`; each text, operand
and list of arguments stands there once. A column called maybe_… has indices plus 1, and 0 for None.

Everything that can be wrong with an answer is `RefusedError`. What is right was checked to the last field, so that a
worker in somebody's power can say nothing but what some file could have said.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stapsdtd.elf.build_id import MAX_BUILD_ID_BYTES
from stapsdtd.elf.container import MAX_SECTIONS
from stapsdtd.elf.nops import LONGEST_NOP_BYTES
from stapsdtd.elf.notes import MAX_ARGUMENTS, MAX_NAME_BYTES
from stapsdtd.elf.read_only import MAX_READ_ONLY_SEGMENTS
from stapsdtd.elf.segments import SEMAPHORE_BYTES
from stapsdtd.elf.sites import MAX_NOTES
from stapsdtd.elf.symbols import MAX_FUNCTION_NAME_BYTES
from stapsdtd.errors import ObjectUnreadableError
from stapsdtd.model import Argument, Operand, ParsedObject, Problem, ReadOnlySegment, Site
from stapsdtd.sandbox.shapes import (
    MAX_REASON_BYTES,
    MAX_SIZE,
    MAX_TEXT_BYTES,
    SHAPES,
    RefusedError,
    encode_operand,
    fits,
)

__all__ = [
    "LENGTH",
    "MAX_ANSWER_BYTES",
    "REQUEST",
    "ParserFailedError",
    "RefusedError",
    "decode",
    "encode",
    "encode_reason",
    "framed",
    "length_of",
]

REQUEST = b"P"
LENGTH = struct.Struct("<Q")

MAX_ANSWER_BYTES = 128 << 20
MAX_TEXTS_BYTES = 64 << 20
"""As many bytes as MAX_NOTES_BYTES allows notes; and 500,000 problems with a reason of 100 bytes each fit."""

_MAX_DISTINCT_ARGUMENTS = 1 << 18
"""Operands with a symbol differ from site to site. libjvm.so has some 700."""

_MAX_PROBLEMS = MAX_NOTES + 2 * MAX_SECTIONS
_MAX_EACH_BYTES = 4  # of the escape for a byte that is no UTF-8

_UNREADABLE, _PARSED, _FAILED = 0, 1, 2
_SIGNED, _FLOAT = 1, 2

_ARCHITECTURE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BUILD_ID = re.compile(rf"(?:[0-9a-f]{{2}}){{1,{MAX_BUILD_ID_BYTES}}}")

_CELLS = np.array([len(shape.fields) for shape in SHAPES], np.int64)
_Column = NDArray[Any]
_T = TypeVar("_T")


class ParserFailedError(ObjectUnreadableError):
    """Not the file but the parser has a defect, which somebody should hear of."""


class _Counts(NamedTuple):
    texts: int
    texts_bytes: int
    operands: int
    cells: int
    arguments: int
    lists: int
    listed: int
    sites: int
    problems: int
    read_only: int
    architecture: int
    maybe_build_id: int
    lacks_symbols: int


_COUNTS = struct.Struct(f"<{len(_Counts._fields)}I")
_HEADER_BYTES = 1 + _COUNTS.size

_MOST = _Counts(
    texts=2 * MAX_NOTES,
    texts_bytes=MAX_TEXTS_BYTES,
    operands=_MAX_DISTINCT_ARGUMENTS,
    cells=_MAX_DISTINCT_ARGUMENTS * int(_CELLS.max()),
    arguments=_MAX_DISTINCT_ARGUMENTS,
    lists=MAX_NOTES,
    listed=4 * MAX_NOTES,
    sites=MAX_NOTES,
    problems=_MAX_PROBLEMS,
    read_only=MAX_READ_ONLY_SEGMENTS,
    architecture=2 * MAX_NOTES,
    maybe_build_id=2 * MAX_NOTES,
    lacks_symbols=1,
)

_COLUMNS = (
    ("texts", "text_lengths", "<u4"),
    ("texts_bytes", "text_bytes", "u1"),
    ("operands", "operand_kinds", "u1"),
    ("cells", "operand_cells", "<u8"),
    ("arguments", "argument_texts", "<u4"),
    ("arguments", "argument_sizes", "<u4"),
    ("arguments", "argument_flags", "u1"),
    ("arguments", "argument_operands", "<u4"),
    ("lists", "list_lengths", "u1"),
    ("listed", "listed_arguments", "<u4"),
    ("sites", "site_providers", "<u4"),
    ("sites", "site_names", "<u4"),
    ("sites", "site_offsets", "<u8"),
    ("sites", "site_semaphores", "<u8"),
    ("sites", "site_maybe_functions", "<u4"),
    ("sites", "site_lists", "<u4"),
    ("sites", "site_nop_bytes", "u1"),
    ("problems", "problem_providers", "<u4"),
    ("problems", "problem_names", "<u4"),
    ("problems", "problem_reasons", "<u4"),
    ("read_only", "read_only_vaddrs", "<u8"),
    ("read_only", "read_only_offsets", "<u8"),
    ("read_only", "read_only_sizes", "<u8"),
)
"""Which count says how long it is, its name, and the type of its numbers."""


def encode_reason(reason: str, *, failed: bool = False) -> list[bytes]:
    """An answer of no object. failed: it is not the file's fault, or should not be."""
    return [bytes([_FAILED if failed else _UNREADABLE]), reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]]


def framed(parts: Sequence[bytes]) -> list[bytes]:
    return [LENGTH.pack(sum(map(len, parts))), *parts]


def encode(parsed: ParsedObject) -> list[bytes]:
    """An answer in parts. Raises ObjectUnreadableError where it would be larger than the daemon takes."""
    texts = _Numbered[str]()
    columns = _operand_columns(parsed, texts)
    sites, problems = parsed.sites, parsed.problems
    for name, kind, values in (
        ("site_providers", "<u4", (texts(site.provider) for site in sites)),
        ("site_names", "<u4", (texts(site.name) for site in sites)),
        ("site_offsets", "<u8", (site.site_offset for site in sites)),
        ("site_semaphores", "<u8", (site.semaphore_offset or 0 for site in sites)),
        ("site_maybe_functions", "<u4", (_maybe(texts, site.function) for site in sites)),
        ("site_nop_bytes", "u1", (site.nop_bytes for site in sites)),
    ):
        columns[name] = np.fromiter(values, kind, len(sites))
    for name, of in (
        ("problem_providers", operator.attrgetter("provider")),
        ("problem_names", operator.attrgetter("name")),
        ("problem_reasons", operator.attrgetter("reason")),
    ):
        columns[name] = np.fromiter(map(texts, map(of, problems)), "<u4", len(problems))
    columns["read_only_vaddrs"] = np.array([segment.vaddr for segment in parsed.read_only], "<u8")
    columns["read_only_offsets"] = np.array([segment.offset for segment in parsed.read_only], "<u8")
    columns["read_only_sizes"] = np.array([segment.size for segment in parsed.read_only], "<u8")
    architecture, maybe_build_id = texts(parsed.architecture), _maybe(texts, parsed.build_id)
    raw = [text.encode() for text in texts.all]
    columns["text_lengths"] = np.fromiter(map(len, raw), "<u4", len(raw))
    columns["text_bytes"] = np.frombuffer(b"".join(raw), "u1")
    lengths = {count: len(columns[name]) for count, name, _ in _COLUMNS}
    counts = _Counts(
        **lengths,
        architecture=architecture,
        maybe_build_id=maybe_build_id,
        lacks_symbols=int(parsed.lacks_symbols),
    )
    for what, count, most in zip(_Counts._fields, counts, _MOST, strict=True):
        if count > most:
            raise ObjectUnreadableError(f"it has {count} {what.replace('_', ' ')}, more than {most}")
    return [bytes([_PARSED]), _COUNTS.pack(*counts), *(columns[name].tobytes() for _, name, _ in _COLUMNS)]


class _Numbered(dict[_T, int]):
    """Numbers values as they come, equal ones alike."""

    def __call__(self, value: _T) -> int:
        return self.setdefault(value, len(self))

    @property
    def all(self) -> Iterable[_T]:
        return self


def _maybe(texts: _Numbered[str], text: str | None) -> int:
    return 0 if text is None else texts(text) + 1


def _operand_columns(parsed: ParsedObject, texts: _Numbered[str]) -> dict[str, _Column]:
    # by identity, since the parser makes one list of each argument string, and comparing takes as long as sending
    numbers: dict[int, int] = {}
    of_site = np.fromiter(
        (numbers.setdefault(id(site.arguments), len(numbers)) for site in parsed.sites), "<u4", len(parsed.sites)
    )
    lists = {id(site.arguments): site.arguments for site in parsed.sites}
    arguments, operands = _Numbered[Argument](), _Numbered[Operand]()
    listed = [arguments(argument) for in_list in lists.values() for argument in in_list]
    argument_operands = [operands(argument.operand) for argument in arguments.all]
    kinds, cells = [], list[int]()
    for operand in operands.all:
        kind, more = encode_operand(operand, texts)
        kinds.append(kind)
        cells += more
    return {
        "operand_kinds": np.array(kinds, "u1"),
        "operand_cells": np.array(cells, "<u8"),
        "argument_texts": np.array([texts(argument.text) for argument in arguments.all], "<u4"),
        "argument_sizes": np.array([argument.size for argument in arguments.all], "<u4"),
        "argument_flags": np.array([_flags(argument) for argument in arguments.all], "u1"),
        "argument_operands": np.array(argument_operands, "<u4"),
        "list_lengths": np.array([len(in_list) for in_list in lists.values()], "u1"),
        "listed_arguments": np.array(listed, "<u4"),
        "site_lists": of_site,
    }


def _flags(argument: Argument) -> int:
    return _SIGNED * argument.signed | _FLOAT * argument.is_float


def length_of(prefix: bytes) -> int:
    """How long the answer is that follows its first LENGTH.size bytes. Raises RefusedError where that is too much."""
    length: int = LENGTH.unpack(prefix)[0]
    if not 0 < length <= MAX_ANSWER_BYTES:
        raise RefusedError(f"an answer of {length} bytes")
    return length


def decode(answer: bytes | bytearray, file_size: int) -> ParsedObject:
    """The object that an answer tells, of a file of that many bytes.

    Raises RefusedError, ObjectUnreadableError where that is what the answer tells, and nothing else.
    """
    if answer[:1] == bytes([_UNREADABLE]):
        raise ObjectUnreadableError(_reason(answer))
    if answer[:1] == bytes([_FAILED]):
        raise ParserFailedError(f"the parser failed: {_reason(answer)}")
    if len(answer) < _HEADER_BYTES or answer[0] != _PARSED:
        raise RefusedError("no answer of a known kind")
    counts = _Counts(*_COUNTS.unpack_from(answer, 1))
    for what, count, most in zip(_Counts._fields, counts, _MOST, strict=True):
        if count > most:
            raise RefusedError(f"{count} {what}, more than {most}")
    if counts.sites + counts.problems > _MAX_PROBLEMS:
        raise RefusedError("more sites and problems than an object can have notes")
    columns = _columns(answer, counts)
    texts = _Texts(columns)
    lists = _lists(columns, texts)
    return ParsedObject(
        texts.matching(_ARCHITECTURE, counts.architecture),
        texts.matching(_BUILD_ID, counts.maybe_build_id - 1) if counts.maybe_build_id else None,
        _sites(columns, texts, lists, file_size),
        _problems(columns, texts),
        bool(counts.lacks_symbols),
        _read_only(columns, file_size),
    )


def _reason(answer: bytes | bytearray) -> str:
    if not 1 < len(answer) <= 1 + MAX_REASON_BYTES:
        raise RefusedError(f"a reason of {len(answer) - 1} bytes")
    reason = answer[1:].decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in reason)


def _columns(answer: bytes | bytearray, counts: _Counts) -> dict[str, _Column]:
    sizes = {name: getattr(counts, count) * np.dtype(kind).itemsize for count, name, kind in _COLUMNS}
    if _HEADER_BYTES + sum(sizes.values()) != len(answer):
        raise RefusedError(f"an answer of {len(answer)} bytes, which its counts do not make")
    columns, at = {}, _HEADER_BYTES
    for count, name, kind in _COLUMNS:
        columns[name] = np.frombuffer(answer, kind, getattr(counts, count), at)
        at += sizes[name]
    return columns


class _Texts:
    """The texts of an answer, each of which must differ from all others."""

    def __init__(self, columns: dict[str, _Column]) -> None:
        self._lengths = columns["text_lengths"]
        data = columns["text_bytes"].tobytes()
        ends = np.cumsum(self._lengths, dtype=np.int64)
        if (int(ends[-1]) if len(ends) else 0) != len(data):
            raise RefusedError("the texts are not as long as their lengths say")
        if b"\0" in data:
            raise RefusedError("a text has a NUL")
        places = zip((ends - self._lengths).tolist(), ends.tolist(), strict=True)
        try:
            if data.isascii():
                text = data.decode("ascii")
                self.all = [text[begin:end] for begin, end in places]
            else:
                self.all = [data[begin:end].decode() for begin, end in places]
        except UnicodeDecodeError as error:
            raise RefusedError("a text is no UTF-8") from error
        if len(set(self.all)) != len(self.all):
            raise RefusedError("a text stands there twice")

    def of(self, column: _Column, most_bytes: int, least_bytes: int = 1) -> Iterable[str]:
        """The texts that a column of indices means."""
        self._check(column, most_bytes, least_bytes)
        return map(self.all.__getitem__, column.tolist())

    def maybe(self, column: _Column, most_bytes: int) -> Iterable[str | None]:
        self._check(column[column > 0] - 1, most_bytes, 1)
        known: list[str | None] = [None, *self.all]
        return map(known.__getitem__, column.tolist())

    def matching(self, pattern: re.Pattern[str], index: int) -> str:
        if index >= len(self.all) or not pattern.fullmatch(self.all[index]):
            raise RefusedError("the architecture or the build-id is none")
        return self.all[index]

    def _check(self, column: _Column, most_bytes: int, least_bytes: int) -> None:
        _check_below(column, len(self.all))
        lengths = self._lengths[column]
        if len(column) and not least_bytes <= lengths.min() <= lengths.max() <= most_bytes:
            raise RefusedError(f"a text is shorter than {least_bytes} bytes or longer than {most_bytes}")


def _check_below(column: _Column, count: int) -> None:
    if len(column) and column.max() >= count:
        raise RefusedError(f"index {column.max()} of {count}")


def _lists(columns: dict[str, _Column], texts: _Texts) -> list[tuple[Argument, ...]]:
    arguments = _arguments(columns, texts)
    lengths, listed = columns["list_lengths"], columns["listed_arguments"]
    _check_below(listed, len(arguments))
    if int(lengths.sum(dtype=np.int64)) != len(listed) or (len(lengths) and lengths.max() > MAX_ARGUMENTS):
        raise RefusedError("the lists of arguments are not as long as their lengths say, or too long")
    ends = np.cumsum(lengths, dtype=np.int64)
    all_listed = list(map(arguments.__getitem__, listed.tolist()))
    return [tuple(all_listed[end - length : end]) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]


def _arguments(columns: dict[str, _Column], texts: _Texts) -> list[Argument]:
    operands, kinds = _operands(columns, texts), columns["operand_kinds"].tolist()
    sizes, flags, indices = (columns[f"argument_{what}"] for what in ("sizes", "flags", "operands"))
    _check_below(sizes, MAX_SIZE + 1)
    _check_below(flags, (_SIGNED | _FLOAT) + 1)
    _check_below(indices, len(operands))
    of = texts.of(columns["argument_texts"], MAX_TEXT_BYTES)
    arguments = []
    for text, size, flag, index in zip(of, sizes.tolist(), flags.tolist(), indices.tolist(), strict=True):
        argument = Argument(text, size, bool(flag & _SIGNED), bool(flag & _FLOAT), operands[index])
        if not fits(argument, kinds[index]):
            raise RefusedError(f"an operand that no argument of {size} bytes has")
        arguments.append(argument)
    return arguments


def _operands(columns: dict[str, _Column], texts: _Texts) -> list[Operand]:
    kinds = columns["operand_kinds"]
    _check_below(kinds, len(SHAPES))
    lengths = _CELLS[kinds]
    if int(lengths.sum()) != columns["operand_cells"].size:
        raise RefusedError("the operands are not as long as their kinds say")
    cells, ends = columns["operand_cells"].tolist(), np.cumsum(lengths).tolist()
    places = zip(kinds.tolist(), lengths.tolist(), ends, strict=True)
    return [SHAPES[kind].decode(cells[end - length : end], texts.all) for kind, length, end in places]


def _sites(
    columns: dict[str, _Column], texts: _Texts, lists: list[tuple[Argument, ...]], file_size: int
) -> tuple[Site, ...]:
    providers, names, offsets, semaphores, functions, of_lists, nop_bytes = (
        columns[f"site_{what}"]
        for what in ("providers", "names", "offsets", "semaphores", "maybe_functions", "lists", "nop_bytes")
    )
    _check_below(of_lists, len(lists))
    _check_below(offsets, file_size)
    _check_below(semaphores, max(file_size - SEMAPHORE_BYTES + 1, 1))
    if (semaphores % SEMAPHORE_BYTES).any():
        raise RefusedError("a semaphore at an odd offset")
    _check_below(nop_bytes, LONGEST_NOP_BYTES + 1)
    if not nop_bytes.all():
        raise RefusedError("a nop without a length")
    _check_distinct(offsets, providers, names)
    make: Callable[..., Site] = Site
    return tuple(
        map(
            make,
            texts.of(providers, _MAX_EACH_BYTES * MAX_NAME_BYTES),
            texts.of(names, _MAX_EACH_BYTES * MAX_NAME_BYTES),
            offsets.tolist(),
            [offset or None for offset in semaphores.tolist()],
            texts.maybe(functions, _MAX_EACH_BYTES * MAX_FUNCTION_NAME_BYTES),
            map(lists.__getitem__, of_lists.tolist()),
            nop_bytes.tolist(),
        )
    )


def _check_distinct(*columns: _Column) -> None:
    """One of each (site, provider, name): the kernel refuses an event that has the same site twice."""
    order = np.lexsort(columns)
    ordered = [column[order] for column in columns]
    same = np.logical_and.reduce([column[1:] == column[:-1] for column in ordered])
    if same.any():
        raise RefusedError("a probe has the same site twice")


def _read_only(columns: dict[str, _Column], file_size: int) -> tuple[ReadOnlySegment, ...]:
    fields = [columns[f"read_only_{what}"].tolist() for what in ("vaddrs", "offsets", "sizes")]
    segments = tuple(map(ReadOnlySegment, *fields))
    if any(not segment.size or segment.offset + segment.size > file_size for segment in segments):
        raise RefusedError("a segment that the file does not have")
    return segments


def _problems(columns: dict[str, _Column], texts: _Texts) -> tuple[Problem, ...]:
    most = _MAX_EACH_BYTES * MAX_NAME_BYTES
    providers, names = (texts.of(columns[f"problem_{what}"], most, 0) for what in ("providers", "names"))
    return tuple(map(Problem, providers, names, texts.of(columns["problem_reasons"], MAX_REASON_BYTES)))
