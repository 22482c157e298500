"""What a program needs to know of each hit, so that it is captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stapsdtd.query.d.captured import Place, argument_index, place_of
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import Call, Clause, Expression, Scope, Statement, Variable, walk
from stapsdtd.query.d.text import text_of_expression
from stapsdtd.query.d.values import STRING_BYTES, String

FIELDS = ("uid", "gid")
"""What is told of hits only if it is asked for."""
_ARGUMENTS = frozenset(["args", *(f"arg{number}" for number in range(10))])


@dataclass(frozen=True, slots=True)
class Needs:
    """numbers, strings: arguments by position. memory: behind arguments. fields: some of FIELDS. string_bytes: of each
    string, with the NUL.
    """

    numbers: frozenset[int] = frozenset()
    strings: frozenset[int] = frozenset()
    memory: frozenset[Place] = frozenset()
    fields: tuple[str, ...] = ()
    string_bytes: int = STRING_BYTES

    @property
    def captures(self) -> str:
        """The capture list."""
        numbers = [f"arg{index}" for index in sorted(self.numbers)]
        length = "" if self.string_bytes == STRING_BYTES else f"[{max(self.string_bytes - 1, 1)}]"
        strings = [f"arg{index}:str{length}" for index in sorted(self.strings)]
        buffers = [f"arg{index}:buf[{length}]" for index, length in self.buffers]
        return ", ".join(numbers + strings + buffers)

    @property
    def buffers(self) -> list[tuple[int, int]]:
        """The captures that memory is in: arguments, each with how many bytes, in the order of the capture list."""
        return sorted({(place.argument, place.end) for place in self.memory})


def needs_of(checked: Checked, clauses: Iterable[Clause]) -> Needs:
    """clauses: those that are interpreted. Raises DError for memory that is not an argument's."""
    numbers: set[int] = set()
    strings: set[int] = set()
    memory: set[Place] = set()
    fields: set[str] = set()
    for clause in clauses:
        for node in _nodes(clause):
            match node:
                case Call("copyinstr", arguments):
                    strings.add(_copied(arguments[0]))
                case Call("copyin") as call:
                    memory.add(_place(call))
                case Variable(name, Scope.GLOBAL) if name in FIELDS:
                    fields.add(name)
                case Variable(name, Scope.GLOBAL) if name in _ARGUMENTS:
                    wanted = strings if isinstance(checked.type_of(node), String) else numbers
                    wanted.add(argument_index(node))
                case _:
                    pass
    return Needs(frozenset(numbers), frozenset(strings), frozenset(memory), tuple(sorted(fields)), checked.string_bytes)


def _nodes(clause: Clause) -> Iterator[Statement]:
    roots = (clause.predicate, *(clause.statements or ()))
    for root in roots:
        if root is not None:
            yield from (node for node, _ in walk(root))


def _place(call: Call) -> Place:
    try:
        return place_of(call)
    except TypeError:
        raise DError(
            f"copyin() takes an argument, such as arg0 or arg0 + 8, and not {text_of_expression(call.arguments[0])}: "
            "memory is captured when the probe fires",
            call.at,
        ) from None
    except ValueError as error:
        raise DError(str(error), call.at) from None


def _copied(pointer: Expression) -> int:
    try:
        return argument_index(pointer)
    except TypeError:
        raise DError(
            f"copyinstr() takes an argument, such as arg0, and not {text_of_expression(pointer)}: "
            "memory is captured when the probe fires",
            pointer.at,
        ) from None
