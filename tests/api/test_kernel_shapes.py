"""Types of kernel functions' values from the API to the client, in a kernel that a test makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.cli.kernel_values import json_of, text_of
from stapsdtd.client import (
    ArrayShape,
    AsyncClient,
    Client,
    EnumShape,
    NumberShape,
    OpaqueShape,
    PointerShape,
    ProtocolError,
    RecordShape,
    Shape,
)
from stapsdtd.client.kernel_functions import listing
from stapsdtd.v1 import kernel_functions_pb2 as pb
from tests.api.served import Served, served
from tests.unit.kernel_types import FakeKernel, colors, kernel_functions

ASKED = (
    "by_pointer(outer->flags, outer->flags.high, outer->either, outer->color, outer->numbers, outer->next, "
    "outer->name[0])"
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with kernel_functions(FakeKernel()) as functions, served(tmp_path, functions=functions) as started:
        yield started


def shapes_of(client: Client, text: str) -> list[Shape | None]:
    (function,) = client.kernel_functions(text, types=True)
    return [value.shape for value in function.values]


def test_shapes(server: Served) -> None:
    with Client(f"unix:{server.socket}") as client:
        flags, high, either, color, numbers, following, char = shapes_of(client, ASKED)
    assert isinstance(flags, RecordShape)
    assert (flags.keyword, flags.name, flags.size) == ("struct", "flags", 8)
    assert [(each.name, each.bit_offset, each.bits) for each in flags.members] == [
        ("low", 0, 3), ("high", 3, 7), ("wide", 14, 41), ("is_set", 55, 1),
    ]  # fmt: skip
    assert high is flags.members[1].shape
    assert flags.members[3].shape == NumberShape(1, is_bool=True)
    assert isinstance(either, RecordShape)
    assert [each.name for each in either.members] == ["", "pair", "name"]
    assert color == EnumShape(4, False, colors())
    assert numbers == ArrayShape(16, NumberShape(4, signed=True), 4)
    assert following == PointerShape(8)
    assert char == NumberShape(1, signed=True, is_char=True)


def test_values_are_printed_by_their_shapes(server: Served) -> None:
    with Client(f"unix:{server.socket}") as client:
        flags, either = shapes_of(client, "by_pointer(outer->flags, outer->either)")
        (pair,) = shapes_of(client, "with_pair(pair)")
    assert flags
    assert either
    assert pair
    assert text_of(flags, 3 << 14 | 1 << 9 | 2) == "{.low = 2, .high = -64, .wide = 3}"
    assert text_of(pair, bytes([1, *[0] * 7, *[255] * 8])) == "{.first = 1, .second = -1}"
    assert json_of(either, b"\1\0\2") == {
        "x": 1, "bytes": [2, None], "pair": {"first": None, "second": None}, "name": None,
    }  # fmt: skip


def test_both_clients_give_them_only_where_asked_for(server: Served) -> None:
    async def ask() -> tuple[Shape | None, Shape | None]:
        async with AsyncClient(f"unix:{server.socket}") as client:
            (bare,) = await client.kernel_functions("by_pointer(outer->color)")
            (shaped,) = await client.kernel_functions("by_pointer(outer->color)", types=True)
            return bare.values[0].shape, shaped.values[0].shape

    bare, shaped = asyncio.run(ask())
    assert bare is None
    assert isinstance(shaped, EnumShape)
    with Client(f"unix:{server.socket}") as client:
        (function,) = client.kernel_functions("by_pointer(outer->flags.high, outer->flags.low)")
    assert [(value.shape, value.signed) for value in function.values] == [(None, True), (None, False)]


def response(*types: pb.KernelType, shape: int) -> pb.ListKernelFunctionsResponse:
    function = pb.KernelFunction(values=[pb.KernelValue(shape=shape)])
    return pb.ListKernelFunctionsResponse(functions=[function], types=types)


def test_what_this_client_does_not_know_is_opaque() -> None:
    # of a server that has one kind more
    unknown = pb.KernelType.FromString(pb.KernelType(size=3).SerializeToString() + b"\x7a\x00")
    assert listing(response(unknown, shape=0)).functions[0].values[0].shape == OpaqueShape(3)


def test_unsigned_enums_have_no_negative_values() -> None:
    (value,) = (
        listing(
            response(
                pb.KernelType(size=8, enumeration=pb.KernelEnum(enumerators=[pb.Enumerator(name="ALL", value=-1)])),
                shape=0,
            )
        )
        .functions[0]
        .values
    )
    assert value.shape == EnumShape(8, False, {"ALL": (1 << 64) - 1})


def test_enumerators_of_a_value_have_the_sign_of_its_type() -> None:
    values = [
        pb.KernelValue(signed=signed, enumerators=[pb.Enumerator(name="ALL", value=-1)]) for signed in (True, False)
    ]
    message = pb.ListKernelFunctionsResponse(functions=[pb.KernelFunction(values=values)])
    signed, unsigned = listing(message).functions[0].values
    assert (signed.enumerators, unsigned.enumerators) == ({"ALL": -1}, {"ALL": (1 << 64) - 1})


@pytest.mark.parametrize(
    "message",
    [
        response(shape=0),
        response(pb.KernelType(array=pb.KernelArray(element=0)), shape=0),
        response(pb.KernelType(record=pb.KernelRecord(members=[pb.KernelMember(type=1)])), pb.KernelType(), shape=0),
    ],
)
def test_tables_without_an_end_are_refused(message: pb.ListKernelFunctionsResponse) -> None:
    with pytest.raises(ProtocolError, match="a reference to type"):
        listing(message)
