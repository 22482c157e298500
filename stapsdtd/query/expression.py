"""The syntax tree of an expression.

A condition is true or false, a value is a number, a string or bytes. Conditions made of `Comparison`, `Not`, `And` and
`Or` alone are what an engine can test; the daemon evaluates the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum


class Field(Enum):
    """A property of every hit, of its probe or, as ELAPSED, of the span that it ends.

    The value is the name in the expression language.
    """

    PID = "pid"
    TID = "tid"
    UID = "uid"
    GID = "gid"
    EXECNAME = "execname"
    CGROUP = "cgroup"
    CONTAINER = "container"
    CPU = "cpu"
    TIMESTAMP = "timestamp"
    ELAPSED = "elapsed"
    PROVIDER = "provider"
    MODULE = "module"
    MODULE_PATH = "module_path"
    FUNCTION = "function"
    NAME = "name"


TESTED_NUMBERS = frozenset({Field.PID, Field.TID, Field.UID, Field.GID})
STRING_FIELDS = frozenset(Field) - TESTED_NUMBERS - {Field.CPU, Field.TIMESTAMP, Field.ELAPSED}


class Operator(Enum):
    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="


class Arithmetic(Enum):
    """SWAP: the eight bytes of the left side in reverse order, shifted to the right by the right one: by 48 bits, the
    last two bytes alone, as ntohs() has them.
    """

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"
    REMAINDER = "%"
    AND = "&"
    OR = "|"
    XOR = "^"
    LEFT = "<<"
    RIGHT = ">>"
    SWAP = "swap"


BITWISE = frozenset({Arithmetic.AND, Arithmetic.OR, Arithmetic.XOR})
UNSIGNED = BITWISE | {Arithmetic.SWAP}
"""Whose results are unsigned, whatever their operands are."""
INTEGERS_ONLY = UNSIGNED | {Arithmetic.REMAINDER, Arithmetic.LEFT, Arithmetic.RIGHT}


@dataclass(frozen=True, slots=True)
class ArgumentValue:
    """`arg2`: the probe's argument as a number, signed if the note says so."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A number, of 64 bits if it is an integer, or a string. 2 and 2.0 are different ones."""

    value: int | float | bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and type(self.value) is type(other.value) and self.value == other.value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclass(frozen=True, slots=True)
class StringAt:
    """`str(arg0, length)`: the string that an argument points to, cut to a length; None for the engine's limit."""

    argument: ArgumentValue
    length: Value | None = None


@dataclass(frozen=True, slots=True)
class BytesAt:
    """`buf(arg0, size)`: so many bytes from where an argument points to, NULs and all."""

    argument: ArgumentValue
    size: int


@dataclass(frozen=True, slots=True)
class Calculation:
    """`left operator right`, of numbers."""

    operator: Arithmetic
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Conditional:
    """`condition ? then : otherwise`; both are conditions, or numbers, or strings, or bytes."""

    condition: Condition
    then: Expression
    otherwise: Expression


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup of the unified hierarchy and all below it. id: its directory's inode number. level: 0 for the root."""

    path: str
    id: int
    level: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`(subject & mask) operator value`; mask None stands for all bits.

    value is bytes (at most 15, no NUL) for EXECNAME, a Cgroup for CGROUP, else an int. The first two support only ==
    and !=.
    """

    subject: Field | ArgumentValue
    operator: Operator
    value: int | bytes | Cgroup
    mask: int | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """`left operator right`: any two numbers, or two strings, or bytes and bytes, which a string may be.

    Only numbers support more than == and !=.
    """

    operator: Operator
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Matched:
    """`subject ~ "pattern"`: a string, or bytes, match a glob."""

    subject: Value
    pattern: bytes


@dataclass(frozen=True, slots=True)
class Not:
    operand: Condition


@dataclass(frozen=True, slots=True)
class _Joined:
    """Its hash is computed once: what is found out of a filter is kept by the filter, and asked for at each site."""

    operands: tuple[Condition, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.operands))

    def __hash__(self) -> int:
        return self._hash


class And(_Joined):
    __slots__ = ()


class Or(_Joined):
    __slots__ = ()


Condition = Comparison | Compared | Matched | Not | And | Or | Conditional
Value = ArgumentValue | Field | Literal | StringAt | BytesAt | Calculation | Conditional
Expression = Condition | Value


def parts(expression: Expression) -> tuple[Expression, ...]:
    """Return what an expression is directly made of."""
    match expression:
        case Not(operand):
            return (operand,)
        case And(operands) | Or(operands):
            return operands
        case Compared(_, left, right) | Calculation(_, left, right):
            return left, right
        case Comparison(subject):
            return (subject,)
        case Matched(subject):
            return (subject,)
        case Conditional(condition, then, otherwise):
            return condition, then, otherwise
        case StringAt(_, length):
            return () if length is None else (length,)
        case _:
            return ()


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all that it is made of, from left to right."""
    waiting = [expression]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += reversed(parts(each))


def is_bytes(expression: Expression) -> bool:
    """Report whether an expression is bytes, rather than a string, a number or a condition."""
    match expression:
        case Conditional(_, then):
            return is_bytes(then)
        case _:
            return isinstance(expression, BytesAt)


def conjuncts(condition: Condition) -> Iterator[Condition]:
    """Yield conditions that hold together exactly if this one does."""
    waiting = [condition]
    while waiting:
        each = waiting.pop()
        if isinstance(each, And):
            waiting += reversed(each.operands)
        else:
            yield each


def all_of(conditions: tuple[Condition, ...]) -> Condition | None:
    """Return a condition that holds if all of them do; None if there are none."""
    return conditions[0] if len(conditions) == 1 else And(conditions) if conditions else None
