"""What a predicate says, as a tree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Field(Enum):
    """What is known of every hit, by the name that users write."""

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
    """`arg2`: the probe's argument as an integer, signed where the note says so."""

    index: int


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup of the unified hierarchy, with what is below it: the id is its directory's inode, the root's level 0."""

    path: str
    id: int
    level: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """`(subject & mask) operator value`; mask None is all bits.

    value is an int for numbers, bytes (15 at most, no NUL) for EXECNAME, a Cgroup for CGROUP. The last two know == and
    != only.
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
