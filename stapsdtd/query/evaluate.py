"""Evaluate expressions on events of one site, a column at a time.

    arg0 + 1 > 5 && str(arg1) ~ "SELECT*"

A value is unavailable if something that it needs is, or if it is divided by 0. `&&`, `||` and `? :` do not need what C
would not evaluate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from stapsdtd.events.columns import Bools, Numbers, Strings, ValueColumn
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.globs import compiled
from stapsdtd.model import BuiltIn, Capture, Site
from stapsdtd.query.expression import (
    And,
    ArgumentValue,
    Arithmetic,
    BytesAt,
    Calculation,
    Cgroup,
    Compared,
    Comparison,
    Condition,
    Conditional,
    Expression,
    Field,
    Literal,
    Matched,
    Not,
    Operator,
    Or,
    StringAt,
    Value,
    is_bytes,
    walk,
)
from stapsdtd.query.matched_texts import matching
from stapsdtd.query.needs import capture_of
from stapsdtd.query.numbers import Truth, calculate, choose, chosen, compare, either, literal


@dataclass(frozen=True, slots=True)
class Texts:
    """A string, or bytes, for each event, None where it is unavailable."""

    values: list[bytes | None]

    def without(self, missing: Bools | None) -> Texts:
        if missing is None:
            return self
        pairs = zip(self.values, missing.tolist(), strict=True)
        return Texts([None if is_missing else text for text, is_missing in pairs])

    def told(self, test: Callable[[bytes], bool]) -> Truth:
        """Return for which strings a test holds."""
        data = np.array([text is not None and test(text) for text in self.values], np.bool_)
        return Truth(data, self.missing)

    @property
    def missing(self) -> Bools | None:
        missing = np.array([text is None for text in self.values], np.bool_)
        return missing if missing.any() else None


_STEPS = 4
"""Of a value or an operation."""

_Column = Numbers | Truth | Texts
_T = TypeVar("_T")


def evaluate(expression: Expression, events: SiteEvents) -> ValueColumn:
    """Return the expression's value for each event; a condition's is 1 or 0. Its needs must be among the captures."""
    column = _Evaluator(events).value(expression)
    match column:
        case Truth(data, unavailable):
            return Numbers(data.astype(np.int64), unavailable)
        case Numbers():
            return column
        case Texts(values):
            return replace(Strings.of(values), is_raw=is_bytes(expression))


def steps(expressions: Iterable[Expression]) -> int:
    """Return how many steps evaluating some expressions takes for each byte of events, at most and about."""
    parts = (part for expression in expressions for part in walk(expression))
    return 1 + sum(_STEPS + (len(part.pattern) if isinstance(part, Matched) else 0) for part in parts)


def truth_of(condition: Condition, events: SiteEvents) -> Truth:
    """Return for which events a condition holds, and of which that is not known."""
    return _Evaluator(events).truth(condition)


class _Evaluator:
    def __init__(self, events: SiteEvents) -> None:
        self._events = events
        self._batch = events.batch
        self._count = len(events.batch)

    def value(self, expression: Expression) -> _Column:
        """As `evaluate`, but strings that were cut are marked."""
        match expression:
            case StringAt():
                return self._string(expression, is_marked=True)
            case Conditional():
                return self._conditional(expression, self.value)
            case _:
                return self.evaluate(expression)

    def evaluate(self, expression: Expression) -> _Column:
        match expression:
            case Literal(value):
                return self._same(value) if isinstance(value, bytes) else literal(value, self._count)
            case ArgumentValue(index):
                return self._argument(index)
            case Field():
                return self._field(expression)
            case StringAt():
                return self._string(expression)
            case BytesAt():
                return Texts(self._captured(Strings, capture_of(expression)).tolist())
            case Calculation(how, left, right):
                return calculate(how, self._numbers(left), self._numbers(right))
            case Conditional():
                return self._conditional(expression, self.evaluate)
            case _:
                return self._truth(expression)

    def truth(self, condition: Expression) -> Truth:
        return _only(Truth, self.evaluate(condition))

    def _numbers(self, value: Value) -> Numbers:
        return _only(Numbers, self.evaluate(value))

    def _texts(self, value: Value) -> Texts:
        return _only(Texts, self.evaluate(value))

    def _same(self, text: bytes) -> Texts:
        return Texts([text] * self._count)

    def _truth(self, condition: Comparison | Compared | Matched | Not | And | Or) -> Truth:
        match condition:
            case Not(operand):
                truth = self.truth(operand)
                return Truth(~truth.data, truth.unavailable)
            case And(operands):
                return self._until(operands, stop=False)
            case Or(operands):
                return self._until(operands, stop=True)
            case Matched(subject, pattern):
                texts = self._texts(subject)
                return Truth(matching(compiled(pattern), texts.values), texts.missing)
            case Compared(how, left, right):
                return self._compared(how, self.evaluate(left), self.evaluate(right))
            case Comparison(subject, how, Cgroup(path=path)):
                inside = path.rstrip("/").encode(errors="surrogateescape") + b"/"
                truth = self._texts(subject).told(lambda text: (text + b"/").startswith(inside))
                return truth if how is Operator.EQ else Truth(~truth.data, truth.unavailable)
            case Comparison(subject, how, bytes(name)):
                return self._compared(how, self.evaluate(subject), self._same(name))
            case Comparison(subject, how, int(number), mask):
                masked = subject if mask is None else Calculation(Arithmetic.AND, subject, Literal(mask))
                return self._compared(how, self.evaluate(masked), literal(number, self._count))
            case _:
                raise TypeError(f"{condition} is no condition")

    def _until(self, operands: Sequence[Condition], *, stop: bool) -> Truth:
        """Combine conditions; those after the first that is `stop`, or unavailable, do not matter."""
        last = self.truth(operands[-1])
        for operand in reversed(operands[:-1]):
            truth = self.truth(operand)
            is_over = truth.data if stop else ~truth.data
            later = None if last.unavailable is None else last.unavailable & ~is_over
            data = truth.data | last.data if stop else truth.data & last.data
            last = Truth(data, either(truth.unavailable, later))
        return last

    def _compared(self, how: Operator, left: _Column, right: _Column) -> Truth:
        if isinstance(left, Numbers) and isinstance(right, Numbers):
            return compare(how, left, right)
        one, other = _only(Texts, left), _only(Texts, right)
        equal = np.array([a == b for a, b in zip(one.values, other.values, strict=True)], np.bool_)
        return Truth(equal if how is Operator.EQ else ~equal, either(one.missing, other.missing))

    def _conditional(self, conditional: Conditional, value: Callable[[Expression], _Column]) -> _Column:
        which = self.truth(conditional.condition)
        then, otherwise = value(conditional.then), value(conditional.otherwise)
        if isinstance(then, Numbers) and isinstance(otherwise, Numbers):
            numbers = choose(which.data, then, otherwise)
            return Numbers(numbers.data, either(which.unavailable, numbers.unavailable))
        if isinstance(then, Truth) and isinstance(otherwise, Truth):
            unavailable = chosen(which.data, then.unavailable, otherwise.unavailable)
            return Truth(np.where(which.data, then.data, otherwise.data), either(which.unavailable, unavailable))
        choices = zip(which.data.tolist(), _only(Texts, then).values, _only(Texts, otherwise).values, strict=True)
        return Texts([one if first else other for first, one, other in choices]).without(which.unavailable)

    def _captured(self, kind: type[_T], capture: Capture) -> _T:
        return _only(kind, self._events.captured(capture))

    def _argument(self, index: int) -> Numbers:
        column = self._captured(Numbers, Capture(index))
        if column.data.dtype.kind == "u" and self._events.site.arguments[index].size < 8:
            return Numbers(column.data.view(np.int64), column.unavailable)
        return column

    def _string(self, string: StringAt, *, is_marked: bool = False) -> Texts:
        column = self._captured(Strings, capture_of(string))
        texts = Texts((column if is_marked else column.unmarked()).tolist())
        if string.length is None or isinstance(string.length, Literal):
            return texts
        lengths = self._numbers(string.length)
        limits = np.maximum(lengths.data, 0).tolist()
        cut = [None if text is None else text[:limit] for text, limit in zip(texts.values, limits, strict=True)]
        return Texts(cut).without(lengths.unavailable)

    def _field(self, field: Field) -> Numbers | Texts:
        batch = self._batch
        match field:
            case Field.PID:
                return Numbers(batch.pid.astype(np.int64))
            case Field.TID:
                return Numbers(batch.tid.astype(np.int64))
            case Field.CPU:
                return Numbers(batch.cpu.astype(np.int64))
            case Field.TIMESTAMP:
                return Numbers(batch.time_ns)
            case Field.EXECNAME:
                return Texts(list(batch.comm.tolist()))
            case Field.ELAPSED:
                return self._captured(Numbers, Capture(BuiltIn.ELAPSED))
            case Field.UID | Field.GID:
                column = self._captured(Numbers, Capture(BuiltIn(field.value)))
                return Numbers(column.data.view(np.int64), column.unavailable)
            case Field.CGROUP | Field.CONTAINER:
                return Texts(self._captured(Strings, Capture(BuiltIn(field.value))).tolist())
            case Field.PROVIDER | Field.MODULE | Field.MODULE_PATH | Field.FUNCTION | Field.NAME:
                return self._same(site_text(field, self._events.site, self._events.path))


def site_text(field: Field, site: Site, path: str) -> bytes:
    """Return a property of a probe: PROVIDER, MODULE, MODULE_PATH, FUNCTION or NAME. path: of its file."""
    names = {
        Field.PROVIDER: site.provider,
        Field.MODULE: os.path.basename(path),
        Field.MODULE_PATH: path,
        Field.FUNCTION: site.function or "",
        Field.NAME: site.name,
    }
    return names[field].encode(errors="surrogateescape")


def _only(kind: type[_T], column: object) -> _T:
    """Return a column of the type that the parser made sure of."""
    if not isinstance(column, kind):
        raise TypeError(f"expected {kind.__name__}, not {type(column).__name__}")
    return column
