"""Values of kernel functions as text and JSON: what a compiler laid out is read as what the source says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli.kernel_values import json_of, text_of
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
from tests.unit.kernel_values import filled, shape_of

CHAR, INT, UNSIGNED = NumberShape(1, signed=True, is_char=True), NumberShape(4, signed=True), NumberShape(4)
BOOL, POINTER = NumberShape(1, is_bool=True), PointerShape(8)
STATE = EnumShape(4, True, {"LOW": -3, "NONE": 0, "HIGH": 7})
FLAGS = EnumShape(4, False, {"NO": 0, "R": 4, "W": 2, "X": 1})
WIDE = EnumShape(8, False, {"HUGE": (1 << 63) + 1})


def record(*members: MemberShape, size: int = 4, keyword: str = "struct") -> RecordShape:
    return RecordShape(keyword, "", size, members)


PAIR = record(MemberShape("x", NumberShape(2, signed=True), 0), MemberShape("y", NumberShape(2), 16))


def test_every_kind_of_member() -> None:
    whole = filled("fill")
    assert len(whole) == shape_of("values").size
    text = text_of(shape_of("values"), whole)
    assert text.split(", .") == [
        "{.number = -7",
        "byte = 200",
        "yes = true",
        "inside = -5000000000",
        "as_number = 4294967267",
        "field = 3",
        "rest = 134217727",
        "either = {.point = {.x = -1",
        "y = 2}",
        "number = 196607",
        "where = 0x2ffff}",
        "points = {{{.x = 1",
        "y = 2}}, {{}, {.x = 3",
        "y = -4}}}",
        "numbers = {0, 1, -2}",
        "mac = {82, 0, 0, 0, 0, 1}",
        'name = "bash"',
        'full = "eight ch"',
        r'odd = "a\"\\\n\xff"',
        'names = {"ab", "four"}',
        "color = DEEP",
        "unknown = 6",
        "level = LOW",
        "rights = MAY_EXEC | MAY_READ",
        "more_rights = 9",
        "next = 0xffff888100a3c2a0",
        "bits = {.low = 5",
        "high = -60",
        "wide = 2199023255551",
        "is_set = true",
        "tiny = -2",
        "color = DEEP}",
        f"large = {-(1 << 100)}",
        "real = {0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xf0, 0x3f}}",
    ]


def test_zeros_are_shown_where_asked_for() -> None:
    shape = shape_of("values")
    assert text_of(shape, bytes(shape.size)) == "{}"
    text = text_of(shape, bytes(shape.size), shows_zeros=True)
    for shown in (
        "{.number = 0, .byte = 0, .yes = false",
        ".where = NULL}, .points = {{{.x = 0, .y = 0}, {.x = 0, ",
        '.numbers = {0, 0, 0, 0, 0}, .mac = {0, 0, 0, 0, 0, 0}, .name = ""',
        ".color = RED, .unknown = RED, .level = MIDDLE, .rights = 0",
        ".compare = NULL, .bits = {.low = 0, ",
        ".nothing = {}, .real = {0x00, ",
    ):
        assert shown in text
    assert "tail" not in text


def test_json() -> None:
    value = json_of(shape_of("values"), filled("fill"))
    assert json.loads(json.dumps(value)) == value == {
        "number": -7, "byte": 200, "yes": True, "no": False,
        "inside": -5000000000, "as_number": 0xFFFFFFE3, "field": 3, "rest": (1 << 27) - 1,
        "either": {"point": {"x": -1, "y": 2}, "number": 0x2FFFF, "where": "0x2ffff"},
        "points": [
            [{"x": 1, "y": 2}, {"x": 0, "y": 0}, {"x": 0, "y": 0}],
            [{"x": 0, "y": 0}, {"x": 3, "y": -4}, {"x": 0, "y": 0}],
        ],
        "numbers": [0, 1, -2, 0, 0], "mac": [0x52, 0, 0, 0, 0, 1],
        "name": "bash", "full": "eight ch", "odd": 'a"\\\n\\xff', "names": ["ab", "four"],
        "color": "DEEP", "unknown": 6, "level": "LOW", "rights": 5, "more_rights": 9,
        "next": "0xffff888100a3c2a0", "compare": "0x0",
        "bits": {
            "low": 5, "high": -60, "wide": (1 << 41) - 1, "is_set": True, "tiny": -2, "color": "DEEP",
        },
        "large": -(1 << 100), "nothing": {}, "real": "000000000000f03f", "tail": None,
    }  # fmt: skip


@given(st.integers(0, 7), st.integers(-64, 63), st.integers(0, (1 << 41) - 1), st.booleans(), st.integers(-2, 1))
def test_bit_fields(low: int, high: int, wide: int, is_set: bool, tiny: int) -> None:
    value = json_of(shape_of("bits"), filled("bits", low, high, wide, is_set, tiny))
    assert value == {"low": low, "high": high, "wide": wide, "is_set": is_set, "tiny": tiny, "color": "GREEN"}


@pytest.mark.parametrize(
    ("shape", "value", "text", "in_json"),
    [
        (INT, -5, "-5", -5),
        (INT, 0xFFFFFFFB, "-5", -5),
        (UNSIGNED, -5, "4294967291", 4294967291),
        (INT, b"\xfb\xff\xff\xff", "-5", -5),
        (BOOL, 2, "true", True),
        (BOOL, 0, "false", False),
        (CHAR, 65, "65", 65),
        (POINTER, 0, "NULL", "0x0"),
        (POINTER, -1, "0xffffffffffffffff", "0xffffffffffffffff"),
        (STATE, -3, "LOW", "LOW"),
        (STATE, 0xFFFFFFFD, "LOW", "LOW"),
        (STATE, 5, "5", 5),
        (FLAGS, 5, "X | R", 5),
        (FLAGS, 0, "NO", "NO"),
        (FLAGS, 8, "8", 8),
        (FLAGS, 12, "12", 12),
        (EnumShape(4, False, {"A": 0, "B": 1, "C": 2}), 3, "3", 3),
        (EnumShape(4, False, {"A": 1, "B": 2, "C": 4, "LAST": 5}), 6, "6", 6),
        (EnumShape(4, True, {"A": 1, "B": 2, "C": 4, "BAD": -1}), 6, "6", 6),
        (WIDE, (1 << 63) + 1, "HUGE", "HUGE"),
        (WIDE, 1 - (1 << 63), "HUGE", "HUGE"),
        (PAIR, 0x0001FFFE, "{.x = -2, .y = 1}", {"x": -2, "y": 1}),
        (PAIR, -2, "{.x = -2, .y = 65535}", {"x": -2, "y": 65535}),
        # three bytes come as four
        (ArrayShape(3, NumberShape(1), 3), 0x7F030201, "{1, 2, 3}", [1, 2, 3]),
        (ArrayShape(4, CHAR, 4), int.from_bytes(b"ab\0c", "little"), '"ab"', "ab"),
        (ArrayShape(7, CHAR, 7), "naïve\x1b".encode(), '"naïve\\x1b"', "naïve\x1b"),
        (ArrayShape(0, INT, 0), b"", "...", None),
        (ArrayShape(0, record(size=0), 3), b"", "{}", []),
        (OpaqueShape(2), 0x0A01, "{0x01, 0x0a}", "010a"),
        (record(size=0), b"", "{}", {}),
    ],
)  # fmt: skip
def test_values(shape: Shape, value: int | bytes, text: str, in_json: object) -> None:
    assert (text_of(shape, value), json_of(shape, value)) == (text, in_json)


@pytest.mark.parametrize(
    ("shape", "value", "text", "in_json"),
    [
        (INT, b"\1\2", "...", None),
        (POINTER, b"", "...", None),
        (FLAGS, b"\1", "...", None),
        (PAIR, b"", "...", None),
        (PAIR, b"\1\0", "{.x = 1, ...}", {"x": 1, "y": None}),
        (PAIR, b"\1\0\1", "{.x = 1, ...}", {"x": 1, "y": None}),
        (ArrayShape(40, CHAR, 40), b"ab", '"ab"...', "ab"),
        (ArrayShape(40, CHAR, 40), b"ab\0", '"ab"', "ab"),
        (ArrayShape(40, UNSIGNED, 10), b"\1\0\0\0\2\0\0\0\3", "{1, 2, ...}", [1, 2, None]),
        (ArrayShape(40, PAIR, 10), b"\1\0\0\0\2\0", "{{.x = 1}, {.x = 2, ...}, ...}",
         [{"x": 1, "y": 0}, {"x": 2, "y": None}, None]),
        (ArrayShape(1 << 34, UNSIGNED, 1 << 32), b"\1\0\0\0", "{1, ...}", [1, None]),
        (OpaqueShape(4), b"\1", "{0x01, ...}", "01"),
        (record(MemberShape("", PAIR, 0), MemberShape("z", UNSIGNED, 32), size=8), b"\1\0",
         "{.x = 1, ...}", {"x": 1, "y": None, "z": None}),
        (record(MemberShape("a", UNSIGNED, 0, 9), MemberShape("b", INT, 9, 7)), b"\3\xfe",
         "{.a = 3, .b = -1, ...}", {"a": 3, "b": -1}),
        (record(MemberShape("a", UNSIGNED, 0, 8), MemberShape("b", INT, 8, 7)), b"\3",
         "{.a = 3, ...}", {"a": 3, "b": None}),
    ],
)  # fmt: skip
def test_values_that_were_cut(shape: Shape, value: bytes, text: str, in_json: object) -> None:
    assert (text_of(shape, value), json_of(shape, value)) == (text, in_json)


def test_members_of_unions_share_their_bytes() -> None:
    union = record(MemberShape("pair", PAIR, 0), MemberShape("word", UNSIGNED, 0), keyword="union")
    outer = record(MemberShape("tag", UNSIGNED, 0), MemberShape("", union, 32), MemberShape("tail", BOOL, 64), size=12)
    assert text_of(outer, b"\0\0\0\0\1\0\0\0\1\0\0\0") == "{.pair = {.x = 1}, .word = 1, .tail = true}"


def test_bit_fields_of_enums_have_their_sign() -> None:
    fields = record(MemberShape("state", STATE, 3, 4), MemberShape("flags", FLAGS, 7, 3))
    assert text_of(fields, 0b101_1101_000) == "{.state = LOW, .flags = X | R}"


def parts_agree(cut: object, whole: object) -> bool:
    """Return whether a cut value has nothing that the whole one has not."""
    match cut, whole:
        case None, _:
            return True
        case dict(), dict():
            return cut.keys() == whole.keys() and all(parts_agree(cut[key], whole[key]) for key in cut)
        case list(), list():
            return len(cut) <= len(whole) and all(map(parts_agree, cut, whole))
        case str(), str():
            return whole.startswith(cut)
        case _:
            return cut == whole


@given(st.data())
def test_whatever_the_bytes_a_cut_value_is_a_part_of_the_whole_one(data: st.DataObject) -> None:
    shape = shape_of("values")
    # ASCII, since what is cut within a character is no part of it
    whole = bytes(data.draw(st.lists(st.integers(0, 127), min_size=shape.size, max_size=shape.size)))
    cut = whole[: data.draw(st.integers(0, shape.size))]
    assert parts_agree(json_of(shape, cut), json_of(shape, whole))
    for shows_zeros in (False, True):
        shown = text_of(shape, cut, shows_zeros=shows_zeros)
        assert shown.isprintable()
        assert shown.endswith("...}" if cut else "...") == (len(cut) < shape.size)
