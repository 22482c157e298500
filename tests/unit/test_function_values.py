"""Where values lie: what the compiler laid out is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.selectors import parse
from stapsdtd.functions.values import Location, ResolvedValue, resolve
from stapsdtd.kernel.btf import Btf
from tests.unit.kernel_types import btf_path, layouts_path, printed, prototype


@pytest.fixture
def types() -> Iterator[Btf]:
    with Btf(str(layouts_path())) as opened:
        yield opened


@pytest.fixture
def by_value() -> Iterator[Btf]:
    with Btf(str(btf_path())) as opened:
        yield opened


def value(types: Btf, text: str, function: str = "by_pointer") -> ResolvedValue:
    selector = parse(f"{function}({text})")
    (path,) = selector.values
    return resolve(types, prototype(types, function), path, selector.text)


def test_members_are_where_the_compiler_put_them(types: Btf) -> None:
    places = [(text, int(offset), int(size)) for kind, text, offset, size in lines("place")]
    found = [value(types, text) for text, _, _ in places]
    assert [(each.text, each.location, each.size) for each in found] == [
        (text, Location(0, (0, offset)), size) for text, offset, size in places
    ]
    assert len(places) == 21


def test_bit_fields_are_where_the_compiler_put_them(types: Btf) -> None:
    fields = [(text, int(first), int(width)) for kind, text, first, width in lines("bits")]
    at = [(text, value(types, text).location) for text, _, _ in fields]
    assert [(text, 8 * each.offsets[-1] + each.bit_offset, each.bits) for text, each in at] == fields
    assert all(each.bit_offset < 8 for _, each in at)
    assert len(fields) == 6


def lines(kind: str) -> list[tuple[str, str, str, str]]:
    return [(line[0], line[1], line[2], line[3]) for line in printed() if line[0] == kind]


def test_pointers_are_followed(types: Btf) -> None:
    offset = {text: int(at) for _, text, at, _ in lines("place")}
    following, others = offset["outer->next"], offset["outer->others"]
    second = offset["outer->either.pair.second"]
    assert value(types, "outer->next->next->either.pair.second").location == Location(
        0, (0, following, following, second)
    )
    assert value(types, "outer->others[3]->tag").location == Location(0, (0, others, 24, 0))
    assert value(types, "outer[2].tag").location == Location(0, (0, 2 * value(types, "outer[0]").size))
    assert value(types, "rows[1][2]").location == Location(2, (0, 20))
    assert value(types, "text[5]").location == Location(1, (0, 5))
    assert value(types, "outer->name[1]").location == Location(0, (0, offset["outer->name"], 1))


def test_arguments_and_results(by_value: Btf) -> None:
    assert value(by_value, "pair.second", "with_pair").location == Location(1, (8,))
    assert value(by_value, "pair", "with_pair").size == 16
    assert value(by_value, "return").location == Location(None)
    assert value(by_value, "return.words[2]", "returns_large").location == Location(None, (16,))


def test_types_are_told(types: Btf) -> None:
    assert value(types, "outer->pairs[1]").declared == "pair_t[2]"
    assert value(types, "outer->flags.wide").declared == "unsigned long long"
    assert value(types, "outer->tail").size == 0
    assert value(types, "outer->tail[9]").size == 4
    assert value(types, "outer->flags.wide").size == 6
    texts = {
        path
        for path in ("label", "label[0]", "either.bytes", "pairs", "name")
        if value(types, f"outer->{path}").is_text
    }
    assert texts == {"label", "either.bytes"}
    composites = {
        path for path in ("label", "flags", "either", "name", "color") if value(types, f"outer->{path}").is_composite
    }
    assert composites == {"label", "flags", "either"}
    assert value(types, "outer->color").enumerators == (("RED", 0), ("GREEN", 5), ("DEEP", 0x80000000))


@pytest.mark.parametrize(
    ("text", "column", "reason"),
    [
        ("outr->tag", 11, "no argument is called outr; its arguments are outer, text, rows, compare, anything"),
        ("outer.tag", 16, "outer is a pointer; use ->"),
        ("outer->either->x", 24, "outer->either is no pointer but union either; use ."),
        ("outer->flags.lo", 23, "struct flags has no member lo; did you mean low?"),
        ("outer->zzz", 16, "struct outer has no member zzz; it has tag, numbers, flags, inside, as_number, as_bytes, "),
        ("outer->tag.x", 21, "outer->tag is no struct or union but is char"),
        ("outer->tag->x", 21, "outer->tag is no pointer but char"),
        ("outer->opaque->x", 24, "has no members of struct opaque"),
        ("outer->anything->x", 26, "outer->anything does not point to a struct or union but is void *"),
        ("outer->compare->x", 25, "does not point to a struct or union but is compare_t"),
        ("outer->numbers[4]", 25, "outer->numbers has 4 elements, the last of which is 3"),
        ("outer->pairs[2][2]", 26, "outer->pairs[2] has 2 elements, the last of which is 1"),
        ("outer->tag[0]", 21, "outer->tag is no array and no pointer but char"),
        ("anything[1]", 19, "elements of anything, which is void *, have no size"),
        ("outer[99999999]", 16, "too far"),
        ("outer->flags.low[0]", 27, "no array and no pointer"),
    ],
)
def test_mistakes_are_told_with_their_column(types: Btf, text: str, column: int, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        value(types, text)
    assert reason in raised.value.reason
    assert (raised.value.column, raised.value.text) == (column, f"by_pointer({text})")


def test_result_of_a_function_without_one(types: Btf) -> None:
    with pytest.raises(InvalidArgumentError, match="returns nothing"):
        value(types, "return", "returns_nothing")
    with pytest.raises(InvalidArgumentError, match="it has no arguments"):
        value(types, "a", "returns_nothing")
