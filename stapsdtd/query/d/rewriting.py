"""Make a clause of another one, whose expressions are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Branch,
    Call,
    Cast,
    Clause,
    Conditional,
    Expression,
    Statement,
    Step,
    Unary,
    Variable,
)

Change = Callable[[Expression], Expression]


def rewritten(clause: Clause, change: Change) -> Clause:
    """change: takes each expression, whose own parts are replaced already, and returns what is to stand there."""
    return replace(
        clause,
        predicate=None if clause.predicate is None else _expression(clause.predicate, change),
        statements=None if clause.statements is None else _statements(clause.statements, change),
    )


def _statements(statements: Iterable[Statement], change: Change) -> tuple[Statement, ...]:
    return tuple(_statement(each, change) for each in statements)


def _statement(statement: Statement, change: Change) -> Statement:
    if not isinstance(statement, Branch):
        return _expression(statement, change)
    then, otherwise = _statements(statement.then, change), _statements(statement.otherwise, change)
    return Branch(_expression(statement.condition, change), then, otherwise, statement.at)


def _expression(given: Expression, change: Change) -> Expression:
    def made(part: Expression) -> Expression:
        return _expression(part, change)

    match given:
        case Variable(keys=keys) | Aggregation(keys=keys):
            return change(replace(given, keys=tuple(map(made, keys))))
        case Call(arguments=arguments):
            return change(replace(given, arguments=tuple(map(made, arguments))))
        case Unary(operand=operand) | Cast(operand=operand):
            return change(replace(given, operand=made(operand)))
        case Step(target=target):
            return change(replace(given, target=made(target)))
        case Binary(left=left, right=right):
            return change(replace(given, left=made(left), right=made(right)))
        case Assignment(target=target, value=value):
            return change(replace(given, target=made(target), value=made(value)))
        case Conditional(condition=condition, then=then, otherwise=otherwise):
            return change(Conditional(made(condition), made(then), made(otherwise), given.at))
        case _:
            return change(given)
