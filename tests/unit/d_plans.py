"""What becomes of a D program's clauses, where arguments have these types."""

from __future__ import annotations

from stapsdtd.query.d.check import check
from stapsdtd.query.d.lower import Lowered, planned
from stapsdtd.query.d.nodes import Clause
from stapsdtd.query.d.parse import parse
from stapsdtd.query.d.values import Integer, String, Type

TYPES: list[Type] = [Integer(32, is_signed=True), Integer(64, is_signed=False), String()]


def argument_type(clause: Clause, index: int) -> Type | None:
    del clause
    return TYPES[index]


class Known:
    """The second argument is unsigned and has 64 bits, the fourth is signed."""

    def fits(self, clause: Clause, index: int, bits: int) -> bool:
        del clause
        return index not in {1, 3} or bits > 64 or (index == 3 and bits == 64)

    def are_apart(self, clause: Clause, other: Clause) -> bool:
        return not set(clause.descriptions) & set(other.descriptions)


def plan(text: str) -> list[tuple[Lowered, ...] | None]:
    """What becomes of each clause; None for those that are interpreted, of which each has a reason."""
    program = parse(text)
    found = planned(check(program, argument_type), Known())
    assert {*found.lowered, *found.reasons} == set(map(id, program.clauses))
    assert found.lowered.keys().isdisjoint(found.reasons)
    return [found.lowered.get(id(clause)) for clause in program.clauses]


def reasons(text: str) -> list[str]:
    program = parse(text)
    found = planned(check(program, argument_type), Known())
    return [found.reasons[id(clause)] for clause in program.clauses if id(clause) in found.reasons]
