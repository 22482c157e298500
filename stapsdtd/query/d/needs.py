"""What a program needs to know of each hit, so that it is captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.evaluate import argument_index
from stapsdtd.query.d.nodes import Call, Clause, Expression, Scope, Statement, Variable, walk
from stapsdtd.query.d.text import text_of_expression
from stapsdtd.query.d.values import String

FIELDS = ("uid", "gid")
"""What is told of hits only if it is asked for."""
_ARGUMENTS = frozenset(["args", *(f"arg{number}" for number in range(10))])


@dataclass(frozen=True, slots=True)
class Needs:
    """numbers, strings: arguments by position. fields: some of FIELDS."""

    numbers: frozenset[int] = frozenset()
    strings: frozenset[int] = frozenset()
    fields: tuple[str, ...] = ()

    @property
    def captures(self) -> str:
        """The capture list."""
        numbers = [f"arg{index}" for index in sorted(self.numbers)]
        strings = [f"arg{index}:str" for index in sorted(self.strings)]
        return ", ".join(numbers + strings)


def needs_of(checked: Checked, clauses: Iterable[Clause]) -> Needs:
    """clauses: those that are interpreted. Raises DError for memory that is not an argument's."""
    numbers: set[int] = set()
    strings: set[int] = set()
    fields: set[str] = set()
    for clause in clauses:
        for node in _nodes(clause):
            match node:
                case Call("copyinstr", arguments):
                    strings.add(_copied(arguments[0]))
                case Variable(name, Scope.GLOBAL) if name in FIELDS:
                    fields.add(name)
                case Variable(name, Scope.GLOBAL) if name in _ARGUMENTS:
                    wanted = strings if isinstance(checked.type_of(node), String) else numbers
                    wanted.add(argument_index(node))
                case _:
                    pass
    return Needs(frozenset(numbers), frozenset(strings), tuple(sorted(fields)))


def _nodes(clause: Clause) -> Iterator[Statement]:
    roots = (clause.predicate, *(clause.statements or ()))
    for root in roots:
        if root is not None:
            yield from (node for node, _ in walk(root))


def _copied(pointer: Expression) -> int:
    try:
        return argument_index(pointer)
    except TypeError:
        raise DError(
            f"copyinstr() takes an argument, such as arg0, and not {text_of_expression(pointer)}: "
            "memory is captured when the probe fires",
            pointer.at,
        ) from None
