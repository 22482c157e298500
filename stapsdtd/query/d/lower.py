"""Clauses that only add up, as aggregations that the kernel can compute.

    p:::a /arg1 > 9/ { @[copyinstr(arg0), pid] = count(); }     where arg1 > 9, by str(arg0, 255) and pid

A clause is lowered if all that it does is to assign to aggregations that no other clause but END's looks at, and if
what it needs means the same in both languages: arguments and fields as they are, and comparisons with constants. The
interpreter runs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stapsdtd.query.d import texts
from stapsdtd.query.d.aggregations import Function
from stapsdtd.query.d.checked import Checked
from stapsdtd.query.d.evaluate import argument_index
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Call,
    Clause,
    Expression,
    Integer,
    Scope,
    Statement,
    String,
    Unary,
    Variable,
    walk,
)
from stapsdtd.query.d.probes import Moment, meaning
from stapsdtd.query.d.values import String as StringType

FitsSigned = Callable[[Clause, int], bool]
"""Reports whether an argument of all probes that a clause means is a number that fits into 64 bits with a sign."""

_COMPARING = frozenset(["==", "!=", "<", "<=", ">", ">="])
_NUMBERS = frozenset(["pid", "tid", "uid", "gid", "cpu"])
_STRINGS = {"execname": "execname", "probemod": "module", "probefunc": "function", "probename": "name"}
_FUNCTIONS = {
    Function.COUNT: ("count",),
    Function.SUM: ("values", "sum"),
    Function.AVG: ("values", "sum"),
    Function.MIN: ("values", "min"),
    Function.MAX: ("values", "max"),
    Function.QUANTIZE: ("values", "quantize"),
}


class _NotLoweredError(Exception):
    """Why the interpreter has to run a clause."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What to aggregate for one assignment. where, value, by: expressions of the daemon's language."""

    clause: Clause
    aggregation: str
    functions: tuple[str, ...]
    where: str
    value: str
    by: tuple[str, ...]


def lowered(checked: Checked, fits_signed: FitsSigned) -> Mapping[int, tuple[Lowered, ...]]:
    """Return the aggregations of the clauses that can be lowered, by `id` of the clause."""
    observed = _observed(checked)
    found: dict[int, tuple[Lowered, ...]] = {}
    for clause in checked.program.clauses:
        try:
            found[id(clause)] = _Lowering(checked, clause, fits_signed).lowered(observed)
        except _NotLoweredError:
            continue
    return found


def _observed(checked: Checked) -> frozenset[str]:
    """Return the aggregations that a clause looks at, or changes, while the program runs."""
    return frozenset(
        argument.name
        for clause in checked.program.clauses
        if any(meaning(each) is not Moment.END for each in clause.descriptions)
        for statement in clause.statements or ()
        for node, _ in walk(statement)
        if isinstance(node, Call)
        for argument in node.arguments
        if isinstance(argument, Aggregation)
    )


class _Lowering:
    """Of one clause. Its methods raise _NotLoweredError."""

    def __init__(self, checked: Checked, clause: Clause, fits_signed: FitsSigned) -> None:
        self._checked = checked
        self._clause = clause
        self._fits_signed = fits_signed

    def lowered(self, observed: frozenset[str]) -> tuple[Lowered, ...]:
        clause = self._clause
        if not clause.statements or any(meaning(each) is not None for each in clause.descriptions):
            raise _NotLoweredError
        where = "" if clause.predicate is None else self._condition(clause.predicate)
        return tuple(self._assignment(each, where, observed) for each in clause.statements)

    def _assignment(self, statement: Statement, where: str, observed: frozenset[str]) -> Lowered:
        match statement:
            case Assignment(target=Aggregation(name, keys), value=Call() as call) if name not in observed:
                function = self._checked.aggregates[name].function
            case _:
                raise _NotLoweredError
        if function not in _FUNCTIONS or len(call.arguments) > 1:
            raise _NotLoweredError
        value = "".join(map(self._number, call.arguments))
        return Lowered(self._clause, name, _FUNCTIONS[function], where, value, tuple(map(self._key, keys)))

    def _condition(self, expression: Expression) -> str:
        match expression:
            case Binary("&&" | "||" as operator, left, right):
                return f"({self._condition(left)}) {operator} ({self._condition(right)})"
            case Unary("!", operand):
                return f"!({self._condition(operand)})"
            case Binary(operator, left, right) if operator in _COMPARING:
                if _is_constant(right):
                    return f"{self._compared(left, right)} {operator} {_constant(right)}"
                return f"{_constant(left)} {operator} {self._compared(right, left)}"
            case _:
                raise _NotLoweredError

    def _compared(self, subject: Expression, constant: Expression) -> str:
        if not isinstance(constant, String):
            return self._number(subject)
        # a constant that is longer than a captured string is equal to none
        if len(constant.value) >= texts.MAX_BYTES:
            raise _NotLoweredError
        return self._string(subject)

    def _key(self, key: Expression) -> str:
        return self._string(key) if isinstance(self._checked.type_of(key), StringType) else self._number(key)

    def _number(self, expression: Expression) -> str:
        match expression:
            case Variable(name, Scope.GLOBAL) if name in _NUMBERS:
                return name
            case Variable(name, Scope.GLOBAL) if name == "args" or (name.startswith("arg") and name[3:].isdigit()):
                index = argument_index(expression)
                if self._fits_signed(self._clause, index):
                    return f"arg{index}"
        raise _NotLoweredError

    def _string(self, expression: Expression) -> str:
        match expression:
            case Variable(name, Scope.GLOBAL) if name in _STRINGS:
                return _STRINGS[name]
            case Variable("args", Scope.GLOBAL):
                return f"str(arg{argument_index(expression)}, {texts.MAX_BYTES})"
            case Call("copyinstr", (pointer,)):
                return f"str(arg{argument_index(pointer)}, {texts.MAX_BYTES})"
            case Call("copyinstr", (pointer, Integer(length))) if 0 < length <= texts.MAX_BYTES:
                return f"str(arg{argument_index(pointer)}, {length})"
        raise _NotLoweredError


def _is_constant(expression: Expression) -> bool:
    operand = expression.operand if isinstance(expression, Unary) and expression.operator == "-" else expression
    return isinstance(operand, Integer | String)


def _constant(expression: Expression) -> str:
    match expression:
        case Integer(value) if value < 1 << 63:
            return str(value)
        case Unary("-", Integer(value)) if value < 1 << 63:
            return f"-{value}"
        case String(value) if value.isascii() and value.decode().isprintable() and not set(value) & set(b"\"\\'"):
            return f'"{value.decode()}"'
    raise _NotLoweredError
