"""Messages as shapes of the kernel's values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stapsdtd.btf.shapes import ArrayShape, EnumShape, MemberShape, NumberShape, OpaqueShape, PointerShape, RecordShape

if TYPE_CHECKING:
    from stapsdtd.btf.shapes import Shape
    from stapsdtd.v1 import kernel_functions_pb2 as pb


def shape_of(message: pb.KernelShape) -> Shape:
    match message.WhichOneof("kind"):
        case "number":
            number = message.number
            return NumberShape(number.size, number.is_signed, number.is_bool, number.is_char)
        case "pointer":
            return PointerShape(message.pointer)
        case "enum":
            enum = message.enum
            values = tuple((each.name, _value(each.value, enum)) for each in enum.values)
            return EnumShape(enum.size, enum.is_signed, values)
        case "array":
            return ArrayShape(shape_of(message.array.element), message.array.count)
        case "record":
            record = message.record
            members = tuple(map(_member, record.members))
            return RecordShape("union" if record.is_union else "struct", record.name, record.size, members)
        case _:
            return OpaqueShape(message.opaque)


def _member(message: pb.KernelShape.Member) -> MemberShape:
    return MemberShape(message.name, message.bit_offset, message.bits, shape_of(message.shape))


def _value(value: int, enum: pb.KernelShape.Enum) -> int:
    return value if enum.is_signed else value % (1 << 64)
