"""Shapes of the kernel's values as messages."""

from __future__ import annotations

from stapsdtd.btf.shapes import (
    ArrayShape,
    EnumShape,
    MemberShape,
    NumberShape,
    OpaqueShape,
    PointerShape,
    RecordShape,
    Shape,
)
from stapsdtd.v1 import kernel_functions_pb2 as pb

_SIGN = 1 << 63


def shape_message(shape: Shape) -> pb.KernelShape:
    match shape:
        case NumberShape(size, is_signed, is_bool, is_char):
            number = pb.KernelShape.Number(size=size, is_signed=is_signed, is_bool=is_bool, is_char=is_char)
            return pb.KernelShape(number=number)
        case PointerShape(size):
            return pb.KernelShape(pointer=size)
        case EnumShape(size, is_signed, values):
            named = [pb.Enumerator(name=name, value=wrapped(value)) for name, value in values]
            return pb.KernelShape(enum=pb.KernelShape.Enum(size=size, is_signed=is_signed, values=named))
        case ArrayShape(element, count):
            return pb.KernelShape(array=pb.KernelShape.Array(element=shape_message(element), count=count))
        case RecordShape(keyword, name, size, members):
            record = pb.KernelShape.Record(
                is_union=keyword == "union", name=name, size=size, members=map(_member, members)
            )
            return pb.KernelShape(record=record)
        case OpaqueShape(size):
            return pb.KernelShape(opaque=size)


def _member(member: MemberShape) -> pb.KernelShape.Member:
    return pb.KernelShape.Member(
        name=member.name, bit_offset=member.bit_offset, bits=member.bits, shape=shape_message(member.shape)
    )


def wrapped(value: int) -> int:
    """Return a number of 64 bits as one with a sign."""
    return (value + _SIGN) % (2 * _SIGN) - _SIGN
