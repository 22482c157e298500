"""Write an expression as text that parses to the same expression."""

from __future__ import annotations

from stapsdtd.query.byte_order import SIZES
from stapsdtd.query.expression import (
    And,
    ArgumentValue,
    Arithmetic,
    BytesAt,
    Calculation,
    Cgroup,
    Compared,
    Comparison,
    Conditional,
    Expression,
    Field,
    Literal,
    Matched,
    Not,
    Or,
    StringAt,
)

_UNITS = (ArgumentValue, Field, Literal, StringAt, BytesAt, Not)
_TURNED = {8 * size: function for function, size in reversed(SIZES.items())}
_PRINTABLE = range(0x20, 0x7F)
_ESCAPES = {byte: f"\\x{byte:02x}" for byte in range(0x100) if byte not in _PRINTABLE} | {
    ord(each): f"\\{each}" for each in '"\\'
}


def text_of(expression: Expression) -> str:
    """Return an expression's text.

    >>> text_of(Matched(StringAt(ArgumentValue(0), Literal(64)), b"SELECT*"))
    'str(arg0, 64) ~ "SELECT*"'
    """
    match expression:
        case ArgumentValue(index):
            return f"arg{index}"
        case Field():
            return expression.value
        case Literal(value):
            return _quoted(value) if isinstance(value, bytes) else str(value)
        case StringAt(argument, length):
            return f"str({text_of(argument)})" if length is None else f"str({text_of(argument)}, {text_of(length)})"
        case BytesAt(argument, size):
            return f"buf({text_of(argument)}, {size})"
        case Calculation(Arithmetic.SWAP, number, Literal(int(shift))):
            return f"{_TURNED[64 - shift]}({text_of(number)})"
        case Calculation(how, left, right) | Compared(how, left, right):
            return f"{_inner(left)} {how.value} {_inner(right)}"
        case Comparison(subject, how, value, mask):
            masked = text_of(subject) if mask is None else f"({text_of(subject)} & {mask:#x})"
            return f"{masked} {how.value} {_constant(value)}"
        case Matched(subject, pattern):
            return f"{_inner(subject)} ~ {_quoted(pattern)}"
        case Conditional(condition, then, otherwise):
            return f"{_inner(condition)} ? {_inner(then)} : {_inner(otherwise)}"
        case Not(operand):
            return f"!({text_of(operand)})"
        case And(operands):
            return " && ".join(map(_inner, operands))
        case Or(operands):
            return " || ".join(map(_inner, operands))


def _inner(expression: Expression) -> str:
    text = text_of(expression)
    return text if isinstance(expression, _UNITS) else f"({text})"


def _constant(value: int | bytes | Cgroup) -> str:
    if isinstance(value, Cgroup):
        return _quoted(value.path.encode(errors="surrogateescape"))
    return _quoted(value) if isinstance(value, bytes) else str(value)


def _quoted(text: bytes) -> str:
    return f'"{text.decode("latin-1").translate(_ESCAPES)}"'
