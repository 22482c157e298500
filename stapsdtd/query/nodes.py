"""What the parts of an expression are while its syntax tree is built: each with its type and its column."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, cast

from stapsdtd.query.expression import (
    INTEGERS_ONLY,
    TESTED_NUMBERS,
    ArgumentValue,
    Arithmetic,
    BytesAt,
    Calculation,
    Expression,
    Field,
    Literal,
    Value,
)
from stapsdtd.query.parse_error import ParseError, quoted

MAX_COMM_BYTES = 15


class Kind(Enum):
    NUMBER = "a number"
    STRING = "a string"
    BYTES = "bytes"
    CONDITION = "a condition"

    @property
    def is_text(self) -> bool:
        """Report whether it is compared by == and != alone, and with globs."""
        return self is Kind.STRING or self is Kind.BYTES


class Token(NamedTuple):
    """kind: an operator or a parenthesis itself, or what else it is. column: counted from 0."""

    kind: str
    text: str
    column: int


class Node(NamedTuple):
    """An expression as written. depth: number of `!`, `&&`, `||` and `? :` around its innermost part."""

    expression: Expression
    kind: Kind
    column: int
    name: str = "this"
    depth: int = 0

    @property
    def value(self) -> Value:
        """The expression of a number, a string or bytes."""
        return cast("Value", self.expression)

    @property
    def literal(self) -> int | float | bytes | None:
        return self.expression.value if isinstance(self.expression, Literal) else None


def check_sides(left: Node, right: Node, column: int) -> None:
    """Raise ParseError if two nodes cannot be compared. column: of the operator."""
    if left.kind is Kind.CONDITION:
        raise ParseError("the left side is already a condition; combine conditions with && or ||", column)
    if right.kind is Kind.CONDITION:
        raise ParseError("this is already a condition; combine conditions with && or ||", right.column)
    if left.literal is not None and right.literal is not None:
        raise ParseError("one side of a comparison must be arg0, pid, execname, …", left.column)
    subject, other = (right, left) if left.literal is not None else (left, right)
    if subject.kind is Kind.BYTES and (other.kind is Kind.BYTES or isinstance(other.literal, bytes)):
        _check_sizes(subject, other)
        return
    if left.kind is right.kind:
        return
    if subject.kind.is_text and other.kind.is_text:
        raise ParseError(f"{subject.name} is {subject.kind.value} and {other.name} is {other.kind.value}; "
                         "bytes are compared with bytes or a constant", other.column)  # fmt: skip
    if subject.kind.is_text:
        raise ParseError(f'{subject.name} is {subject.kind.value}; write {subject.name} == "…"', other.column)
    hint = f"; write str({subject.name})" if isinstance(subject.expression, ArgumentValue) else ""
    raise ParseError(f"{subject.name} is a number and cannot be compared with a string{hint}", other.column)


def _check_sizes(one: Node, other: Node) -> None:
    """Raise ParseError if bytes are never equal."""
    size, other_size = _size(one.expression), _size(other.expression)
    if size is not None and other_size is not None and size != other_size:
        sizes = f"{one.name} has {size} bytes and {other.name} {other_size}"
        raise ParseError(f"{sizes}; they are never equal", other.column)


def _size(expression: Expression) -> int | None:
    """Return how many bytes an expression has; None if that depends on the hit."""
    match expression:
        case BytesAt(size=size):
            return size
        case Literal(bytes(text)):
            return len(text)
        case _:
            return None


def check_operand(node: Node, how: Arithmetic, column: int) -> None:
    """Raise ParseError if a node is no operand of an operator, which is at a column."""
    if node.kind is Kind.NUMBER:
        if isinstance(node.literal, float) and how in INTEGERS_ONLY:
            raise ParseError(f"{how.value} takes integers", node.column)
        return
    if node.kind is Kind.CONDITION and how is Arithmetic.AND:
        raise ParseError("& selects bits of a number, as in arg0 & 0x40; combine conditions with &&", column)
    if node.kind is Kind.CONDITION:
        raise ParseError(f"{how.value} takes numbers, not conditions; write (… ? 1 : 0)", node.column)
    if node.kind is Kind.STRING and how is Arithmetic.AND:
        raise ParseError(f"{node.name} is a string, which has no bits for &", node.column)
    raise ParseError(f"{node.name} is {node.kind.value}; {how.value} takes numbers", node.column)


def subject_of(expression: Expression) -> tuple[Field | ArgumentValue, int | None] | None:
    """Return what an engine can compare with a constant, and its mask; None if it is something else."""
    match expression:
        case Calculation(Arithmetic.AND, ArgumentValue() | Field() as value, Literal(int(bits))):
            return (value, bits % (1 << 64)) if subject_of(value) else None
        case ArgumentValue():
            return expression, None
        case Field() if expression in TESTED_NUMBERS:
            return expression, None
        case _:
            return None


def merged_mask(left: Expression, right: Expression) -> Calculation | None:
    """Return `left & right` for a value that is masked already, and a constant."""
    if isinstance(left, Literal):
        left, right = right, left
    if not isinstance(right, Literal) or not isinstance(right.value, int):
        return None
    bits = right.value % (1 << 64)
    match left:
        case Calculation(Arithmetic.AND, value, Literal(int(others))):
            return Calculation(Arithmetic.AND, value, Literal(others & bits))
        case ArgumentValue() | Field():
            return Calculation(Arithmetic.AND, left, Literal(bits))
        case _:
            return None


def wrong_comm(name: bytes) -> str | None:
    """Return why no process can have this command name; None if one can."""
    if b"\0" in name:
        return "command names cannot contain NUL"
    if len(name) > MAX_COMM_BYTES:
        prefix = name[:MAX_COMM_BYTES].decode(errors="backslashreplace")
        return f'the kernel cuts command names to {MAX_COMM_BYTES} bytes, and this has {len(name)}; write "{prefix}"'
    return None


def no_cgroup(path: str) -> str:
    return f"no such cgroup: {quoted(path)}; write its path as shown after 0:: in /proc/PID/cgroup"
