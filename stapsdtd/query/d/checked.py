"""A program whose types are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from stapsdtd.query.d.aggregates import Aggregate
from stapsdtd.query.d.nodes import Expression, Program, Scope
from stapsdtd.query.d.printing import Printer
from stapsdtd.query.d.values import STRING_BYTES, Type


@dataclass(frozen=True, slots=True)
class Declared:
    """A variable. keys: of an associative array's elements."""

    type: Type
    keys: tuple[Type, ...] = ()


@dataclass(slots=True)
class Checked:
    """A program without macro variables. types: of its expressions, by `id` of the node. printers: of its printf and
    printa calls, likewise; None of a printa without a format. string_bytes: of a string, with the NUL.
    """

    program: Program
    string_bytes: int = STRING_BYTES
    variables: dict[tuple[Scope, str], Declared] = field(default_factory=dict)
    aggregates: dict[str, Aggregate] = field(default_factory=dict)
    types: dict[int, Type] = field(default_factory=dict)
    printers: dict[int, Printer | None] = field(default_factory=dict)

    def type_of(self, expression: Expression) -> Type:
        return self.types[id(expression)]
