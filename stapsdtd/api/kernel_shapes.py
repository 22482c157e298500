"""Types of kernel functions' values to messages."""

from __future__ import annotations

from collections.abc import Iterable

from stapsdtd.btf.types import Array, Enum, Int, Member, Pointer, Record, is_char
from stapsdtd.functions.shapes import TypeShape
from stapsdtd.v1 import kernel_functions_pb2 as pb

_SIGN = 1 << 63


def shape_message(shape: TypeShape) -> pb.KernelType:
    match shape.type:
        case Int() as number:
            return pb.KernelType(
                size=shape.size,
                number=pb.KernelNumber(signed=number.is_signed, boolean=number.is_bool, character=is_char(number)),
            )
        case Pointer():
            return pb.KernelType(size=shape.size, pointer=pb.KernelPointer())
        case Enum(is_signed=signed, values=values):
            return pb.KernelType(
                size=shape.size, enumeration=pb.KernelEnum(signed=signed, enumerators=enumerator_messages(values))
            )
        case Array(element, count):
            return pb.KernelType(size=shape.size, array=pb.KernelArray(element=element, count=count))
        case Record(keyword, name, _, members):
            record = pb.KernelRecord(keyword=keyword, name=name, members=map(_member, members))
            return pb.KernelType(size=shape.size, record=record)
        case _:
            return pb.KernelType(size=shape.size)


def enumerator_messages(values: Iterable[tuple[str, int]]) -> list[pb.Enumerator]:
    return [
        pb.Enumerator(name=name, value=number - 2 * _SIGN if number >= _SIGN else number) for name, number in values
    ]


def _member(member: Member) -> pb.KernelMember:
    return pb.KernelMember(name=member.name, type=member.type, offset=member.bit_offset, bits=member.bits)
