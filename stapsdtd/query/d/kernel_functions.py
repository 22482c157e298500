"""Kernel functions in D: the provider fbt, as in `fbt::vfs_read:entry` and `fbt::vfs_read:return`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import (
    Clause,
    Description,
    Expression,
    Integer,
    Position,
    Program,
    Scope,
    Variable,
    walk,
)
from stapsdtd.query.d.rewriting import rewritten

PROVIDER = "fbt"
ENTRY, RETURN = "entry", "return"
ELSEWHERE = "arguments differ at returns of functions; use a separate clause for these"
_ARGUMENTS = frozenset(["args", *(f"arg{number}" for number in range(10))])


def descriptions(program: Program) -> Iterator[Description]:
    """Yield those of kernel functions. Only the provider's full name says that they are meant."""
    for clause in program.clauses:
        yield from (each for each in clause.descriptions if each.provider == PROVIDER)


def selector_of(description: Description) -> str:
    """Return what names the functions of a description, as a subscription takes it."""
    name = description.function or "*"
    return f"{description.module}:{name}" if description.module else name


def with_results(program: Program) -> Program:
    """Return a program in which arg0 is a function's result at its return, where D calls it arg1.

    In D, arg0 is then where in the function it returns, which is not known here. Raises DError.
    """
    return replace(program, clauses=tuple(map(_with_results, program.clauses)))


def _with_results(clause: Clause) -> Clause:
    of_returns = {each.provider == PROVIDER and each.name == RETURN for each in clause.descriptions}
    may_return = any(each.provider == PROVIDER and each.name != ENTRY for each in clause.descriptions)
    if not may_return or (at := _argument_in(clause)) is None:
        return clause
    if of_returns != {True}:
        raise DError(ELSEWHERE, at)
    return rewritten(clause, _result)


def _argument_in(clause: Clause) -> Position | None:
    """Return where a clause mentions an argument."""
    roots = [*([] if clause.predicate is None else [clause.predicate]), *(clause.statements or ())]
    for root in roots:
        for node, _ in walk(root):
            if isinstance(node, Variable) and node.scope is Scope.GLOBAL and node.name in _ARGUMENTS:
                return node.at
    return None


def _result(given: Expression) -> Expression:
    match given:
        case Variable("arg1", Scope.GLOBAL):
            return replace(given, name="arg0")
        case Variable("args", Scope.GLOBAL, (Integer(1) as index,)):
            return replace(given, keys=(replace(index, value=0),))
        case Variable(name, Scope.GLOBAL) if name in _ARGUMENTS:
            raise DError("at a return, only the result is available: arg1 or args[1]", given.at)
        case _:
            return given
