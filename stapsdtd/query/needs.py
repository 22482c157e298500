"""What a record must hold so that an expression can be evaluated, and why that is impossible at a site."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from stapsdtd.model import Argument, BuiltIn, Capture, Unavailable
from stapsdtd.query.expression import (
    INTEGERS_ONLY,
    STRING_FIELDS,
    ArgumentValue,
    BytesAt,
    Calculation,
    Comparison,
    Conditional,
    Expression,
    Field,
    Literal,
    StringAt,
    parts,
    walk,
)

_SIZES = frozenset({1, 2, 4, 8})
_BUILT_INS = {Field(each.value) for each in BuiltIn}
_OF_ARGUMENTS = (ArgumentValue, StringAt, BytesAt)


class Type(Enum):
    """Of an expression at a site."""

    INTEGER = "an integer"
    FLOAT = "a floating-point number"
    STRING = "a string"
    BYTES = "bytes"
    CONDITION = "a condition"


class MisfitError(ValueError):
    """Why an expression cannot be evaluated at a site, for users."""


def capture_of(expression: ArgumentValue | StringAt | BytesAt | Field) -> Capture:
    """Return what has to be captured for an argument, a string, bytes, or a field that is a built-in."""
    match expression:
        case ArgumentValue(index):
            return Capture(index)
        case StringAt(ArgumentValue(index), Literal(int(length))):
            return Capture(index, is_string=True, max_bytes=length)
        case StringAt(ArgumentValue(index)):
            return Capture(index, is_string=True)
        case BytesAt(ArgumentValue(index), size):
            return Capture(index, is_buffer=True, max_bytes=size)
        case Field():
            return Capture(BuiltIn(expression.value))


def needs(expression: Expression) -> tuple[Capture, ...]:
    """Return what has to be captured, each once. All else that an expression can need is in every event."""
    wanted = (
        capture_of(each)
        for each in walk(expression)
        if isinstance(each, _OF_ARGUMENTS) or (isinstance(each, Field) and each in _BUILT_INS)
    )
    return tuple(dict.fromkeys(wanted))


def _type_of(expression: Expression, arguments: tuple[Argument, ...]) -> Type:
    """Return an expression's type at sites with these arguments. Raises MisfitError if there is none."""
    types = [_type_of(part, arguments) for part in parts(expression)]
    match expression:
        case ArgumentValue(index):
            return _argument_type(index, arguments)
        case StringAt(ArgumentValue(index)):
            _check_exists(index, arguments)
            if Type.FLOAT in types:
                raise MisfitError(f"the length of str(arg{index}, …) is a floating-point number here")
            return Type.STRING
        case BytesAt(ArgumentValue(index)):
            _check_exists(index, arguments)
            return Type.BYTES
        case Literal(value):
            return Type.STRING if isinstance(value, bytes) else Type.FLOAT if isinstance(value, float) else Type.INTEGER
        case Field():
            return Type.STRING if expression in STRING_FIELDS else Type.INTEGER
        case Calculation(how):
            if Type.FLOAT not in types:
                return Type.INTEGER
            if how in INTEGERS_ONLY:
                raise MisfitError(f"{how.value} takes integers, and an operand is a floating-point number here")
            return Type.FLOAT
        case Comparison(mask=int()) if Type.FLOAT in types:
            raise MisfitError("& takes integers, and an operand is a floating-point number here")
        case Conditional():
            return Type.FLOAT if Type.FLOAT in types[1:] else types[1]
        case _:
            return Type.CONDITION


@lru_cache(maxsize=1 << 10)
def why_not_at(expression: Expression, arguments: tuple[Argument, ...]) -> str | None:
    """Return why an expression cannot be evaluated at sites with these arguments, for users; None if it can."""
    try:
        _type_of(expression, arguments)
    except MisfitError as error:
        return str(error)
    return None


def _check_exists(index: int, arguments: tuple[Argument, ...]) -> None:
    if index >= len(arguments):
        count = "1 argument" if len(arguments) == 1 else f"{len(arguments)} arguments"
        raise MisfitError(f"it has {count}, so there is no arg{index}")


def _argument_type(index: int, arguments: tuple[Argument, ...]) -> Type:
    _check_exists(index, arguments)
    argument = arguments[index]
    if isinstance(argument.operand, Unavailable):
        raise MisfitError(f"cannot evaluate arg{index}: {argument.operand.reason}")
    if argument.is_float:
        return Type.FLOAT
    if argument.size not in _SIZES:
        raise MisfitError(f"cannot evaluate arg{index}: {argument.text} has {argument.size} bytes and is no number")
    return Type.INTEGER
