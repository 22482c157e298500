"""Clauses that only add up, as aggregations that the kernel can compute.

    p:::a /arg1 > 9/ { @[copyinstr(arg0), pid] = count(); }     where arg1 > 9, by str(arg0, 255) and pid

A clause is lowered if all that it does is to assign to aggregations that no other clause but END's looks at, and if
what it needs means the same in both languages: arguments and fields as they are, and comparisons with constants. The
interpreter runs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stapsdtd.aggregate.buckets import linear, log_linear
from stapsdtd.query.d import texts
from stapsdtd.query.d.aggregates import Aggregate, increment_of
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

Fits = Callable[[Clause, int, int], bool]
"""Reports whether an argument of all probes that a clause means is a number that fits into so many bits with a sign."""

_COMPARING = frozenset(["==", "!=", "<", "<=", ">", ">="])
_NUMBERS = frozenset(["pid", "tid", "uid", "gid", "cpu"])
_STRINGS = {"execname": "execname", "probemod": "module", "probefunc": "function", "probename": "name"}
_FUNCTIONS = {
    Function.COUNT: ("count",),
    Function.SUM: ("values", "sum"),
    Function.AVG: ("values", "sum"),
    Function.STDDEV: ("values", "sum"),
    Function.MIN: ("values", "min"),
    Function.MAX: ("values", "max"),
    Function.QUANTIZE: ("values", "quantize"),
}
_SQUARES = {"({0} * {0}) >> 32": 1 << 32, "({0} * {0}) & 4294967295": 1}
"""Two sums that do not exceed 64 bits, of squares of numbers of 32 bits, and what they are multiplied by."""


class _NotLoweredError(Exception):
    """Why the interpreter has to run a clause."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What to aggregate for an assignment. where, value, by: expressions of the daemon's language.

    squares: by what the sum is to be multiplied, which is of squares; 0 if it is of the values themselves.
    """

    clause: Clause
    aggregation: str
    functions: tuple[str, ...]
    where: str
    value: str
    by: tuple[str, ...]
    squares: int = 0


def lowered(checked: Checked, fits: Fits) -> Mapping[int, tuple[Lowered, ...]]:
    """Return the aggregations of the clauses that can be lowered, by `id` of the clause."""
    observed = _observed(checked)
    found: dict[int, tuple[Lowered, ...]] = {}
    for clause in checked.program.clauses:
        try:
            found[id(clause)] = _Lowering(checked, clause, fits).lowered(observed)
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

    def __init__(self, checked: Checked, clause: Clause, fits: Fits) -> None:
        self._checked = checked
        self._clause = clause
        self._fits = fits

    def lowered(self, observed: frozenset[str]) -> tuple[Lowered, ...]:
        clause = self._clause
        if not clause.statements or any(meaning(each) is not None for each in clause.descriptions):
            raise _NotLoweredError
        where = "" if clause.predicate is None else self._condition(clause.predicate)
        return tuple(part for each in clause.statements for part in self._assignment(each, where, observed))

    def _assignment(self, statement: Statement, where: str, observed: frozenset[str]) -> Iterator[Lowered]:
        match statement:
            case Assignment(target=Aggregation(name, keys), value=Call() as call) if name not in observed:
                aggregate = self._checked.aggregates[name]
            case _:
                raise _NotLoweredError
        if increment_of(call) is not None:
            raise _NotLoweredError
        value = "".join(map(self._number, call.arguments[:1]))
        by = tuple(map(self._key, keys))
        yield Lowered(self._clause, name, _functions(aggregate), where, value, by)
        if aggregate.function is Function.STDDEV:
            self._number(call.arguments[0], 32)
            for square, factor in _SQUARES.items():
                yield Lowered(self._clause, name, ("values", "sum"), where, square.format(value), by, factor)

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

    def _number(self, expression: Expression, bits: int = 64) -> str:
        match expression:
            case Variable(name, Scope.GLOBAL) if name in _NUMBERS and bits == 64:
                return name
            case Variable(name, Scope.GLOBAL) if name == "args" or (name.startswith("arg") and name[3:].isdigit()):
                index = argument_index(expression)
                if self._fits(self._clause, index, bits):
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


def _functions(aggregate: Aggregate) -> tuple[str, ...]:
    """Return what the server calls a function. Raises _NotLoweredError if the server has not the same buckets."""
    function, scale, parameters = aggregate.function, aggregate.scale, aggregate.parameters
    if function in _FUNCTIONS or scale is None:
        return _FUNCTIONS[function]
    try:
        if function is Function.LQUANTIZE:
            low, following, high = scale.edges[0], scale.edges[1], scale.edges[-1]
            # a rest that is less than a step has no bin of its own
            parameters = low, high, following - low
            buckets = linear(*parameters)
        else:
            buckets = log_linear(*parameters)
    except ValueError:
        raise _NotLoweredError from None
    if buckets.edges != scale.edges:
        raise _NotLoweredError
    return "values", f"{function.value}({', '.join(map(str, parameters))})"


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
