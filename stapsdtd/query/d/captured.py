"""What a clause takes of a probe's arguments and of the memory that they point to, which is captured at the hit.

arg3, args[3]            the argument 3
copyinstr(arg3)          the string there
copyin(arg3, 8)          Place(3, 0, 8)
copyin(arg3 + 16, 8)     Place(3, 16, 24): a member of a structure
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from stapsdtd.query.d.functions import BUILT_INS
from stapsdtd.query.d.nodes import Binary, Call, Cast, Expression, Integer, Scope, Variable
from stapsdtd.query.d.values import Integer as IntegerType
from stapsdtd.query.d.values import Type, size_of

MAX_BYTES = 4096
"""Of memory behind an argument, up to the end of what is copied."""


class Place(NamedTuple):
    """Memory from `start` to `end`, in bytes behind the address that an argument is."""

    argument: int
    start: int
    end: int


def argument_index(expression: Expression) -> int:
    """Return which argument arg3, or args[3], is. Raises TypeError if it is something else."""
    match expression:
        case Variable("args", Scope.GLOBAL, (Integer(index),)):
            return index
        case Variable(name, Scope.GLOBAL, ()) if name in BUILT_INS and name[3:].isdigit():
            return int(name[3:])
        case Cast(operand=operand):
            return argument_index(operand)
        case _:
            raise TypeError(f"{expression} is no argument of a probe")


def place_of(call: Call) -> Place:
    """Return what copyin() copies. Raises TypeError if that is not of an argument, ValueError if it is too large."""
    address, size = call.arguments
    start = 0
    match address:
        # of a pointer it would count elements
        case Binary("+", Variable() as pointer, Integer(start)) | Binary("+", Integer(start), Variable() as pointer):
            address = pointer
        case _:
            pass
    argument = argument_index(address)
    if not isinstance(size, Integer) or not 0 < size.value <= MAX_BYTES - start:
        raise ValueError(f"copyin() copies 1 to {MAX_BYTES} bytes behind an argument")
    return Place(argument, start, start + size.value)


def text_in(memory: bytes) -> str:
    """Return the string that memory begins with."""
    return memory.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def number_in(memory: bytes, kind: Type) -> int | None:
    """Return the number that memory begins with, None if it is too short."""
    is_signed = isinstance(kind, IntegerType) and kind.is_signed
    size = size_of(kind)
    return int.from_bytes(memory[:size], sys.byteorder, signed=is_signed) if len(memory) >= size else None
