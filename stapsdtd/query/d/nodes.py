"""The syntax tree of a D program, as DTrace defines the language.

    postgresql*:::query-start          a Description
    /pid == $target/                   a predicate, an Expression
    { @[copyinstr(arg0)] = count(); }  Statements

`at` is where a node begins; nodes that differ in that alone are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias


class Position(NamedTuple):
    """Both count from 1."""

    line: int
    column: int


NOWHERE = Position(0, 0)


class Scope(Enum):
    """Of a variable. The values are what stands in front of its name."""

    GLOBAL = ""
    SELF = "self->"
    THIS = "this->"


@dataclass(frozen=True, slots=True)
class Integer:
    """`10`, `0x1fULL`, or `'a'`. suffix: its letters u and l, in lower case."""

    value: int
    suffix: str = ""
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class String:
    value: bytes
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Macro:
    """`$target`, `$1`, or `$$1`, which is the argument as a string. name: without the first `$`."""

    name: str
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Variable:
    """`x`, `self->x`, `names[pid, 1]`, `arg0` or `args[1]`. keys: empty unless it is an associative array's element."""

    name: str
    scope: Scope = Scope.GLOBAL
    keys: tuple[Expression, ...] = ()
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`@name[pid]`. name: empty for `@`."""

    name: str
    keys: tuple[Expression, ...] = ()
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """`copyinstr(arg0)`."""

    name: str
    arguments: tuple[Expression, ...] = ()
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Unary:
    """operator: `-`, `+`, `!` or `~`, or `*` of a pointer."""

    operator: str
    operand: Expression
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """`x++` or, if it is not postfix, `++x`. operator: `++` or `--`."""

    operator: str
    target: Expression
    is_postfix: bool
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Binary:
    """operator: of arithmetic, bits, comparison or logic; `^^` is the logical exclusive or."""

    operator: str
    left: Expression
    right: Expression
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Conditional:
    condition: Expression
    then: Expression
    otherwise: Expression
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """operator: `=`, `+=`, `<<=` and so on."""

    operator: str
    target: Expression
    value: Expression
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Cast:
    """`(uint32_t)arg0`. type: as written, with single spaces."""

    type: str
    operand: Expression
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Member:
    """`args[0]->f_path.dentry`, of a kernel function. path: from the first `->` or `.` on, without spaces."""

    variable: Variable
    path: str
    at: Position = field(default=NOWHERE, compare=False)


Expression: TypeAlias = (
    Integer
    | String
    | Macro
    | Variable
    | Aggregation
    | Call
    | Unary
    | Step
    | Binary
    | Conditional
    | Assignment
    | Cast
    | Member
)


@dataclass(frozen=True, slots=True)
class Branch:
    """`if (…) { … } else { … }`, as oracle/dtrace-utils has it."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...] = ()
    at: Position = field(default=NOWHERE, compare=False)


Statement: TypeAlias = Expression | Branch


class Part(IntEnum):
    """Of a probe description. The values count from the left."""

    PROVIDER = 1
    MODULE = 2
    FUNCTION = 3
    NAME = 4


@dataclass(frozen=True, slots=True)
class Description:
    """`provider:module:function:name`, of which the last parts suffice. Empty parts match everything."""

    provider: str = ""
    module: str = ""
    function: str = ""
    name: str = ""
    at: Position = field(default=NOWHERE, compare=False)

    def __str__(self) -> str:
        return f"{self.provider}:{self.module}:{self.function}:{self.name}"


@dataclass(frozen=True, slots=True)
class Clause:
    """predicate: None if there is none. statements: None if there are no braces, which means the default action."""

    descriptions: tuple[Description, ...]
    predicate: Expression | None
    statements: tuple[Statement, ...] | None
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Declaration:
    """`self string name;`, or `int counts[string, int];`, an associative array. type: as in Cast. keys: likewise."""

    name: str
    type: str
    scope: Scope = Scope.GLOBAL
    keys: tuple[str, ...] = ()
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Option:
    """`#pragma D option quiet`, or with a value, `aggsize=1m`."""

    name: str
    value: str = ""
    at: Position = field(default=NOWHERE, compare=False)


@dataclass(frozen=True, slots=True)
class Program:
    clauses: tuple[Clause, ...]
    declarations: tuple[Declaration, ...] = ()
    options: tuple[Option, ...] = ()


def parts(node: Statement) -> tuple[Statement, ...]:
    """Return what a node is directly made of, from left to right."""
    match node:
        case Variable(keys=keys) | Aggregation(keys=keys):
            return keys
        case Call(arguments=arguments):
            return arguments
        case Unary(operand=operand) | Cast(operand=operand):
            return (operand,)
        case Step(target=target):
            return (target,)
        case Binary(left=left, right=right):
            return left, right
        case Assignment(target=target, value=value):
            return target, value
        case Conditional(condition=condition, then=then, otherwise=otherwise):
            return condition, then, otherwise
        case Branch(condition=condition, then=first, otherwise=second):
            return condition, *first, *second
        case _:
            return ()


def walk(node: Statement) -> Iterator[tuple[Statement, int]]:
    """Yield a node and all that it is made of, each with its depth, from 1. Copes with any depth."""
    waiting = [(node, 1)]
    while waiting:
        each, depth = waiting.pop()
        yield each, depth
        waiting += ((part, depth + 1) for part in reversed(parts(each)))
