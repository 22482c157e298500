"""Replace macro variables: `$target` and `$1` are integers, `$$1` is a string, and in descriptions both are text.

test-prov$target:::go /pid == $target && execname == $$1/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Branch,
    Call,
    Cast,
    Clause,
    Conditional,
    Description,
    Expression,
    Integer,
    Macro,
    Position,
    Program,
    Statement,
    Step,
    String,
    Unary,
    Variable,
)

_MACRO = re.compile(r"\${1,2}([A-Za-z]+|\d+)")
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")


def substituted(program: Program, values: Mapping[str, str]) -> Program:
    """Return a program without macro variables. values: by name, without `$`. Raises DError."""
    return replace(program, clauses=tuple(_Substitution(values).clause(each) for each in program.clauses))


class _Substitution:
    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def clause(self, clause: Clause) -> Clause:
        return replace(
            clause,
            descriptions=tuple(map(self._description, clause.descriptions)),
            predicate=None if clause.predicate is None else self._expression(clause.predicate),
            statements=None if clause.statements is None else self._statements(clause.statements),
        )

    def _value(self, name: str, at: Position) -> str:
        if name not in self._values:
            what = "macro argument" if name.isdigit() else "macro variable"
            raise DError(f"{what} ${name} is not defined", at)
        return self._values[name]

    def _description(self, given: Description) -> Description:
        def replaced(part: str) -> str:
            return _MACRO.sub(lambda macro: self._value(macro[1], given.at), part)

        provider, module, function, name = map(replaced, (given.provider, given.module, given.function, given.name))
        return Description(provider, module, function, name, given.at)

    def _statements(self, statements: Iterable[Statement]) -> tuple[Statement, ...]:
        return tuple(map(self._statement, statements))

    def _statement(self, statement: Statement) -> Statement:
        if not isinstance(statement, Branch):
            return self._expression(statement)
        then, otherwise = self._statements(statement.then), self._statements(statement.otherwise)
        return Branch(self._expression(statement.condition), then, otherwise, statement.at)

    def _all(self, expressions: Iterable[Expression]) -> tuple[Expression, ...]:
        return tuple(map(self._expression, expressions))

    def _expression(self, given: Expression) -> Expression:
        match given:
            case Macro():
                return self._constant(given)
            case Integer() | String():
                return given
            case Variable(keys=keys) | Aggregation(keys=keys):
                return replace(given, keys=self._all(keys))
            case Call(arguments=arguments):
                return replace(given, arguments=self._all(arguments))
            case Unary(operand=operand) | Cast(operand=operand):
                return replace(given, operand=self._expression(operand))
            case Step(target=target):
                return replace(given, target=self._expression(target))
            case Binary(left=left, right=right):
                return replace(given, left=self._expression(left), right=self._expression(right))
            case Assignment(target=target, value=value):
                return replace(given, target=self._expression(target), value=self._expression(value))
            case Conditional(condition=condition, then=then, otherwise=otherwise):
                condition, then, otherwise = self._all((condition, then, otherwise))
                return Conditional(condition, then, otherwise, given.at)

    def _constant(self, macro: Macro) -> Expression:
        text = self._value(macro.name.removeprefix("$"), macro.at)
        if macro.name.startswith("$"):
            return String(text.encode(errors="surrogateescape"), macro.at)
        if not _INTEGER.fullmatch(text):
            raise DError(f"${macro.name} is {text!r}, which is no integer; $${macro.name} is the string", macro.at)
        digits = text.removeprefix("-")
        value = int(digits, 8) if digits.startswith("0") and digits.isdigit() else int(digits, 0)
        if value >= 1 << 64:
            raise DError(f"integer constant is too large: {text}", macro.at)
        integer = Integer(value, at=macro.at)
        return Unary("-", integer, macro.at) if text.startswith("-") else integer
