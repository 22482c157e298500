"""Kernel functions, as the client returns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stapsdtd.client.kernel_shapes import Shape, enumerators_of, shape_at, shapes
from stapsdtd.v1 import kernel_functions_pb2 as pb


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """name: `return` for a result, and empty if the source has none. type: as C writes it. size: in bytes.

    registers: which hold it. refused: why it cannot be traced; empty if it can. record_size: of the struct or union
    that it points to, in bytes; 0 if it points to none.
    """

    name: str
    type: str
    size: int
    registers: tuple[str, ...]
    refused: str = ""
    record_size: int = 0
    signed: bool = False


@dataclass(frozen=True, slots=True)
class KernelValue:
    """argument: the position of the one that it begins with, from 0; None for the result. type: as C writes it.

    size: in bytes, for a bit field those that it is in; 0 for an array without an end. offsets: in bytes, the first one
    in the argument itself, each further one in what the pointer at the one before points to. bit_offset: of a bit
    field, from the lowest bit of the byte at the last offset. bits: of a bit field, otherwise 0. enumerators: values
    of an enum, by name. refused: why the argument cannot be traced; empty if it can. signed: it is a number that may be
    negative. shape: what its bytes mean; None unless asked for. is_text: an array of bytes, which `str()` reads.
    """

    text: str
    type: str
    size: int
    argument: int | None
    offsets: tuple[int, ...]
    bit_offset: int = 0
    bits: int = 0
    enumerators: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""
    signed: bool = False
    shape: Shape | None = None
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """module: `vmlinux` for the kernel itself. prototype: as C declares it. result: its type may be void.

    ways: names of those of this host that fit it, none if it cannot be attached to. refused: what the function itself
    has against being attached to, or against one of the ways. values: those that were asked for.
    """

    name: str
    module: str
    prototype: str
    arguments: tuple[KernelArgument, ...]
    result: KernelArgument
    ways: tuple[str, ...]
    refused: tuple[str, ...]
    values: tuple[KernelValue, ...]


@dataclass(frozen=True, slots=True)
class UnknownFunction:
    """near: names that are like it."""

    function: str
    reason: str
    near: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttachWay:
    """How the kernel lets functions be attached to: `fentry` or `kprobe`. problem, remedy: empty if it is available."""

    name: str
    available: bool
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class FunctionListing:
    """left_out: how many functions match beyond those that one listing has. Iterates over the functions."""

    functions: tuple[KernelFunction, ...]
    unknown: tuple[UnknownFunction, ...]
    left_out: int
    ways: tuple[AttachWay, ...]

    def __iter__(self) -> Iterator[KernelFunction]:
        return iter(self.functions)


def list_request(
    functions: str | Iterable[str], *, names_only: bool = False, types: bool = False
) -> pb.ListKernelFunctionsRequest:
    names = (functions,) if isinstance(functions, str) else functions
    return pb.ListKernelFunctionsRequest(functions=names, names_only=names_only, types=types)


def listing(message: pb.ListKernelFunctionsResponse) -> FunctionListing:
    """Raises ProtocolError."""
    table = shapes(message.types)
    return FunctionListing(
        tuple(_function(function, table) for function in message.functions),
        tuple(UnknownFunction(each.function, each.reason, tuple(each.near)) for each in message.unknown),
        message.left_out,
        tuple(AttachWay(way.name, way.available, way.problem, way.remedy) for way in message.ways),
    )


def _function(message: pb.KernelFunction, table: Sequence[Shape]) -> KernelFunction:
    return KernelFunction(
        message.name,
        message.module,
        message.prototype,
        tuple(map(_argument, message.arguments)),
        _argument(message.result),
        tuple(message.ways),
        tuple(message.refused),
        tuple(_value(value, table) for value in message.values),
    )


def _argument(message: pb.KernelArgument) -> KernelArgument:
    return KernelArgument(
        message.name,
        message.type,
        message.size,
        tuple(message.registers),
        message.refused,
        message.record_size,
        message.signed,
    )


def _value(message: pb.KernelValue, table: Sequence[Shape]) -> KernelValue:
    return KernelValue(
        message.text,
        message.type,
        message.size,
        message.argument if message.HasField("argument") else None,
        tuple(message.offsets),
        message.bit_field.offset,
        message.bit_field.bits,
        enumerators_of(message.enumerators, signed=message.signed),
        message.refused,
        message.signed,
        shape_at(table, message.shape) if message.HasField("shape") else None,
        message.is_text,
    )
