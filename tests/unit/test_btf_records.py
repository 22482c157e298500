"""Records of a BTF, byte by byte; those that compilers here do not write among them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.btf.declare import declare
from stapsdtd.btf.members import find_member, members_of
from stapsdtd.btf.records import body_bytes, decode
from stapsdtd.btf.types import (
    Array,
    BtfError,
    CType,
    Enum,
    Float,
    Forward,
    Int,
    Member,
    Pointer,
    Prototype,
    Qualified,
    Record,
    TypeId,
    Void,
    size_of,
)

NAMES = {0: "", 1: "first", 2: "second", 3: "user", 4: "int"}


def record(kind: int, *words: int, count: int = 0, flag: bool = False, third: int = 0, name: int = 1) -> CType:
    info = flag << 31 | kind << 24 | count
    body = struct.pack(f"={len(words)}I", *words)
    assert body_bytes(info) == len(body)
    return decode((name, info, third), body, NAMES.__getitem__)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (record(1, 0x01000020, third=4, name=4), Int("int", 4, 32, is_signed=True)),
        (record(1, 0x04000008, third=1), Int("first", 1, 8, is_bool=True)),
        (record(1, 0x00050003, third=4), Int("first", 4, 3, bit_offset=5)),
        (record(2, third=7, name=0), Pointer(TypeId(7))),
        (record(3, 7, 8, 9, name=0), Array(TypeId(7), 9)),
        (record(4, 2, 7, 33, count=1, third=8), Record("struct", "first", 8, (Member("second", TypeId(7), 33),))),
        (
            record(5, 2, 7, 3 << 24 | 33, count=1, third=8, flag=True),
            Record("union", "first", 8, (Member("second", TypeId(7), 33, 3),)),
        ),
        (record(6, 2, 0xFFFFFFFF, count=1, third=4), Enum("first", 4, False, (("second", 0xFFFFFFFF),))),
        (record(6, 2, 0xFFFFFFFF, count=1, third=4, flag=True), Enum("first", 4, True, (("second", -1),))),
        (record(7, flag=True), Forward("union", "first")),
        (record(10, third=7, name=0), Qualified("const", TypeId(7))),
        (record(16, third=8), Float("first", 8)),
        (record(18, third=7, name=3), Qualified("__user", TypeId(7))),
        (
            record(19, 2, 0xFFFFFFFE, 0xFFFFFFFF, count=1, third=8, flag=True),
            Enum("first", 8, True, (("second", -2),)),
        ),
        (record(19, 2, 1, 2, count=1, third=8), Enum("first", 8, False, (("second", 0x200000001),))),
    ],
)
def test_records(found: CType, expected: CType) -> None:
    assert found == expected


def test_ellipsis_is_no_parameter() -> None:
    found = record(13, 1, 7, 0, 0, count=2, third=9, name=0)
    assert isinstance(found, Prototype)
    assert (found.is_variadic, [parameter.name for parameter in found.parameters]) == (True, ["first"])


@pytest.mark.parametrize("kind", [14, 15, 17, 0, 25])
def test_what_is_no_type_is_refused(kind: int) -> None:
    with pytest.raises(BtfError, match=f"kind {kind}"):
        decode((1, kind << 24, 0), b"", NAMES.__getitem__)


@given(offset=st.integers(0, (1 << 24) - 1), bits=st.integers(0, 64))
def test_bit_fields_are_packed(offset: int, bits: int) -> None:
    found = record(4, 2, 7, bits << 24 | offset, count=1, third=8, flag=True)
    assert isinstance(found, Record)
    assert found.members == (Member("second", TypeId(7), offset, bits),)


class Made:
    """Types that a test makes, the first of which has number 1."""

    pointer_bytes = 8

    def __init__(self, *types: CType) -> None:
        self._types = (Void(), *types)

    def get(self, ident: TypeId) -> CType:
        return self._types[ident]


def test_bit_field_of_an_old_compiler() -> None:
    """Its width is its type's, and where it begins has two parts."""
    narrow = Int("unsigned int", 4, bits=3, bit_offset=2)
    outer = Record("struct", "s", 4, (Member("", TypeId(3), 32),))
    types = Made(narrow, outer, Record("union", "", 4, (Member("low", TypeId(1), 8), Member("", TypeId(1), 0))))
    assert find_member(types, outer, "low") == Member("low", TypeId(1), 42, 3)
    assert [member.name for member in members_of(types, outer)] == ["low"]


def test_declarations_that_compilers_here_do_not_write() -> None:
    char, proto = Int("char", 1, 8), Prototype(TypeId(0), (), is_variadic=True)
    types = Made(
        char,
        Qualified("__user", TypeId(1)),
        Pointer(TypeId(2)),
        Qualified("const", TypeId(3)),
        Record("struct", "", 4, ()),
        Array(TypeId(5), 0),
        proto,
        Pointer(TypeId(7)),
        Qualified("const", TypeId(2)),
        Pointer(TypeId(9)),
    )
    assert declare(types, TypeId(4), "buf") == "char __user *const buf"
    assert declare(types, TypeId(10), "buf") == "const char __user *buf"
    assert declare(types, TypeId(6), "tail") == "struct {...} tail[]"
    assert declare(types, TypeId(6)) == "struct {...}[]"
    assert declare(types, TypeId(8), "call") == "void (*call)(...)"
    assert [size_of(types, TypeId(each)) for each in (0, 1, 4, 6, 7)] == [0, 1, 8, 0, 0]
