"""The syntax tree of a predicate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Field(Enum):
    """A property of every hit. The value is the name in the expression language."""

    PID = "pid"
    TID = "tid"
    UID = "uid"
    GID = "gid"
    EXECNAME = "execname"
    CGROUP = "cgroup"


class Operator(Enum):
    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="


@dataclass(frozen=True, slots=True)
class ArgumentValue:
    """`arg2`: the probe's argument as an integer, signed if the note says so."""

    index: int


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
class Not:
    operand: Expression


@dataclass(frozen=True, slots=True)
class And:
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Or:
    operands: tuple[Expression, ...]


Expression = Comparison | Not | And | Or
