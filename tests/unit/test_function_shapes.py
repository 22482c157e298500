"""Shapes of types: a table without a BTF, which ends, and has each type once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stapsdtd.btf.types import VOID, Array, Enum, Int, Member, Pointer, Record, Void, size_of
from stapsdtd.functions import shapes
from stapsdtd.functions.selectors import parse
from stapsdtd.functions.shapes import ShapeTable, TypeShape
from stapsdtd.kernel.btf import Btf
from tests.unit.kernel_types import FakeKernel, colors, kernel_functions
from tests.unit.kernel_values import btf_path, pointed_to


@pytest.fixture
def types() -> Iterator[Btf]:
    with Btf(str(btf_path())) as opened:
        yield opened


def added(types: Btf, *names: str) -> tuple[tuple[TypeShape, ...], list[int]]:
    """Return the table of some structs, and the number of each."""
    table = ShapeTable()
    numbers = [table.add(types, pointed_to(types, name)) for name in names]
    return table.shapes, numbers


def members(shape: TypeShape) -> dict[str, Member]:
    assert isinstance(shape.type, Record)
    return {member.name: member for member in shape.type.members}


def test_typedefs_and_qualifiers_are_gone_and_pointers_point_to_nothing(types: Btf) -> None:
    table, (number,) = added(types, "values")
    by_name = {name: table[member.type] for name, member in members(table[number]).items()}
    assert by_name["number"] == TypeShape(4, Int("int", 4, 32, is_signed=True))
    assert by_name["next"] == by_name["compare"] == TypeShape(8, Pointer(VOID))
    assert by_name["name"].size == 8
    assert isinstance(by_name["name"].type, Array)
    assert by_name["rights"] == TypeShape(
        4, Enum("rights", 4, False, (("MAY_EXEC", 1), ("MAY_WRITE", 2), ("MAY_READ", 4)))
    )
    assert by_name["real"] == TypeShape(8, Void())
    assert isinstance(by_name["tail"].type, Array)
    assert (by_name["tail"].size, by_name["tail"].type.count) == (0, 0)
    assert isinstance(by_name[""].type, Record)


def test_a_type_comes_once_and_behind_what_it_has(types: Btf) -> None:
    table, numbers = added(types, "values", "bits", "nested", "values")
    assert len(set(table)) == len(table)
    assert numbers[0] == numbers[3]
    for position, shape in enumerate(table):
        match shape.type:
            case Record(members=found):
                assert all(member.type < position for member in found)
            case Array(element):
                assert element < position
    assert sum(isinstance(shape.type, Record) and shape.type.name == "point" for shape in table) == 1


def test_bit_fields(types: Btf) -> None:
    table, (number,) = added(types, "bits")
    found = {name: (each.bit_offset, each.bits) for name, each in members(table[number]).items()}
    assert found["low"] == (0, 3)
    assert found["high"] == (3, 7)
    assert found["wide"] == (14, 41)
    # what only fills bits has no name
    assert "" not in found


def test_what_is_never_fetched_is_left_out(types: Btf) -> None:
    table, (number,) = added(types, "far")
    assert list(members(table[number])) == ["near", "points"]
    # it reaches beyond
    assert table[number].size == 2040 + 4 * 4 + 8


def test_bounded(types: Btf, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, (first,) = added(types, "nested")
    monkeypatch.setattr(shapes, "MAX_SHAPES", len(whole))
    table, (known, beyond) = added(types, "nested", "values")
    assert (table[: len(whole)], known) == (whole, first)
    # nothing is known of it but how large it is
    assert table[beyond:] == (TypeShape(size_of(types, pointed_to(types, "values")), Void()),)


def test_of_several_btf(types: Btf) -> None:
    """Those of two modules are of the same kernel."""
    table = ShapeTable()
    with Btf(str(btf_path())) as other:
        assert table.add(types, pointed_to(types, "values")) == table.add(other, pointed_to(other, "values"))


def test_only_where_asked_for() -> None:
    selectors = [parse("by_pointer(outer->flags, outer->color, outer->next->flags)")]
    kernel = FakeKernel()
    with kernel_functions(kernel) as functions:
        found = functions.functions("uid 0", selectors, with_shapes=True).result(20)
        bare = functions.functions("uid 0", selectors).result(20)
    flags, color, again = found.functions[0].values
    assert flags.shape == again.shape
    assert flags.shape is not None
    assert color.shape is not None
    assert members(found.shapes[flags.shape])["wide"].bits == 41
    assert found.shapes[color.shape].type == Enum("color", 4, False, tuple(colors().items()))
    assert (bare.shapes, [value.shape for value in bare.functions[0].values]) == ((), [None] * 3)
