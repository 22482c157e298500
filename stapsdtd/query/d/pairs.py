"""Two clauses that take the time between probes, as one span.

    p:::start { self->t = timestamp; }
    p:::done /self->t && arg0 > 9/ { @[pid] = quantize((timestamp - self->t) / 1000); self->t = 0; }

    pairs by thread whose end has arg0 > 9: quantize of (elapsed) / 1000, by pid

An end whose predicate is false ends nothing in either, and its start waits on. Of several starts the last one counts,
which `Span.takes_latest` is for, or the first one if they have the predicate !self->t. So no other clause may look at
the variable, and the end must set it to 0 when all is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.lower_expressions import NotLoweredError, Sites
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Clause,
    Expression,
    Integer,
    Scope,
    Statement,
    Unary,
    Variable,
    walk,
)
from stapsdtd.query.d.text import text_of_expression
from stapsdtd.query.d.values import Integer as IntegerType

_TIMESTAMP = Variable("timestamp")
_ZERO = Integer(0)


@dataclass(frozen=True, slots=True)
class Pair:
    """variable: the self-> variable that has the start's time. start_condition, end_condition: what their predicates
    demand besides. assignments: what the end adds up. times: this-> variables that have the time elapsed, as texts.
    """

    variable: Variable
    start: Clause
    end: Clause
    start_condition: Expression | None
    end_condition: Expression | None
    takes_latest: bool
    assignments: tuple[Assignment, ...]
    times: Mapping[Variable, str]

    def elapsed(self, expression: Expression) -> str:
        """Return a time elapsed as an expression of the daemon's language. Raises NotLoweredError."""
        return _elapsed(expression, self.variable, self.times)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two clauses that alone use a self-> variable, of which the first does nothing but to keep the time in it.

    shared: the this-> variables that the end shares with other clauses, which may be of the same hit.
    """

    variable: Variable
    start: Clause
    end: Clause
    shared: frozenset[str] = frozenset()

    def pair(self, checked: Checked, sites: Sites) -> Pair:
        """Raises NotLoweredError."""
        variable = self.variable
        if not _has_64_bits(checked, variable):
            raise NotLoweredError(f"{text_of_expression(variable)} has not the 64 bits of a time")
        if not sites.are_apart(self.start, self.end):
            raise NotLoweredError("a probe is of both clauses")
        starts, ends = _conjuncts(self.start.predicate), _conjuncts(self.end.predicate)
        is_first = [each for each in starts if each in (Unary("!", variable), Binary("==", variable, _ZERO))]
        is_begun = [
            each for each in ends if each in (variable, Binary("!=", variable, _ZERO), Binary(">", variable, _ZERO))
        ]
        if not is_begun:
            raise NotLoweredError(f"its predicate does not ask for {text_of_expression(variable)}")
        if self.shared:
            raise NotLoweredError(f"this->{min(self.shared)} is of another clause, too")
        *statements, last = self.end.statements or (None,)
        if last != Assignment("=", variable, _ZERO):
            raise NotLoweredError(f"it does not end with {text_of_expression(variable)} = 0")
        assignments, times = _body(checked, variable, statements)
        return Pair(
            variable,
            self.start,
            self.end,
            _all_of([each for each in starts if each not in is_first]),
            _all_of([each for each in ends if each not in is_begun]),
            not is_first,
            assignments,
            times,
        )


def candidates(checked: Checked) -> Iterator[Candidate]:
    users = _users(checked, Scope.SELF)
    shared = {name: clauses for name, clauses in _users(checked, Scope.THIS).items() if len(clauses) > 1}
    for name, clauses in users.items():
        variable = Variable(name, Scope.SELF)
        begins = (Assignment("=", variable, _TIMESTAMP),)
        starts = [clause for clause in clauses if clause.statements == begins]
        ends = [clause for clause in clauses if clause.statements != begins]
        if len(starts) == len(ends) == 1:
            names = frozenset(name for name, some in shared.items() if ends[0] in some)
            yield Candidate(variable, starts[0], ends[0], names)


def _users(checked: Checked, scope: Scope) -> dict[str, list[Clause]]:
    """Return the clauses that mention each variable of a scope, by its name."""
    users: dict[str, list[Clause]] = {}
    for clause in checked.program.clauses:
        roots = (clause.predicate, *(clause.statements or ()))
        nodes = (node for root in roots if root is not None for node, _ in walk(root))
        for name in {node.name: None for node in nodes if isinstance(node, Variable) and node.scope is scope}:
            users.setdefault(name, []).append(clause)
    return users


def _body(
    checked: Checked, variable: Variable, statements: Sequence[Statement | None]
) -> tuple[tuple[Assignment, ...], Mapping[Variable, str]]:
    """Return the assignments to aggregations, and the this-> variables that have the time elapsed."""
    assignments: list[Assignment] = []
    times: dict[Variable, str] = {}
    for statement in statements:
        match statement:
            case Assignment(target=Aggregation()):
                assignments.append(statement)
            case Assignment("=", Variable(scope=Scope.THIS) as target, value) if _has_64_bits(checked, target):
                times[target] = _elapsed(value, variable, times)
            case _:
                raise NotLoweredError("it does more than add up times")
    return tuple(assignments), times


def _elapsed(expression: Expression, variable: Variable, times: Mapping[Variable, str]) -> str:
    match expression:
        case Binary("-", left, right) if (left, right) == (_TIMESTAMP, variable):
            return "elapsed"
        case Binary("/", time, Integer(divisor)) if 0 < divisor < 1 << 63:
            return f"({_elapsed(time, variable, times)}) / {divisor}"
        case Variable() if expression in times:
            return times[expression]
    raise NotLoweredError(f"{text_of_expression(expression)} is not the time since the start")


def _has_64_bits(checked: Checked, variable: Variable) -> bool:
    declared = checked.variables[variable.scope, variable.name]
    return isinstance(declared.type, IntegerType) and declared.type.bits == 64 and not (declared.keys or variable.keys)


def _conjuncts(expression: Expression | None) -> list[Expression]:
    match expression:
        case None:
            return []
        case Binary("&&", left, right):
            return [*_conjuncts(left), *_conjuncts(right)]
        case _:
            return [expression]


def _all_of(conditions: list[Expression]) -> Expression | None:
    return reduce(lambda left, right: Binary("&&", left, right), conditions) if conditions else None
