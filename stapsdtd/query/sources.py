"""What keys and values of an aggregation are: captures and fields of the hit, or expressions of them.

arg0              Capture(0)
str(arg1, 64)     Capture(1, is_string=True, max_bytes=64)
buf(arg1, 16)     Capture(1, is_buffer=True, max_bytes=16)
pid               HitField.PID
arg0 / 1000       ExpressionSource: evaluated in the daemon, of what it needs
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stapsdtd.aggregate.aggregation import HitField, KeySource
from stapsdtd.events.columns import ValueColumn
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.model import BuiltIn, Capture, Site
from stapsdtd.query.evaluate import evaluate
from stapsdtd.query.expression import (
    ArgumentValue,
    BytesAt,
    Conditional,
    Expression,
    Field,
    Literal,
    StringAt,
    is_bytes,
)
from stapsdtd.query.needs import capture_of, needs, why_not_at
from stapsdtd.query.text import text_of

_BUILT_INS = frozenset(each.value for each in BuiltIn)
_HIT_FIELDS = frozenset(each.value for each in HitField)


@dataclass(frozen=True, slots=True)
class ExpressionSource:
    """Implements `aggregate.aggregation.Computed`. Compared by its text, in which 2 and 2.0 differ."""

    expression: Expression = field(compare=False)
    text: str = field(init=False)
    captures: tuple[Capture, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", text_of(self.expression))
        object.__setattr__(self, "captures", needs(self.expression))

    @property
    def is_bytes(self) -> bool:
        return is_bytes(self.expression)

    def why_not_at(self, site: Site) -> str | None:
        return why_not_at(self.expression, site.arguments)

    def column(self, events: SiteEvents) -> ValueColumn:
        return evaluate(self.expression, events)


def key_source(expression: Expression, max_bytes: int) -> KeySource | ExpressionSource:
    """Return what a key is. max_bytes: of strings among others that it may be, where they say no length."""
    match expression if isinstance(expression, StringAt) else _cut(expression, max_bytes):
        case Field(value=name) if name in _HIT_FIELDS:
            return HitField(name)
        case other:
            return value_source(other)


def value_source(expression: Expression) -> Capture | ExpressionSource:
    """Return what a value is."""
    match expression:
        case ArgumentValue() | StringAt(length=None | Literal()) | BytesAt():
            return capture_of(expression)
        case Field(value=name) if name in _BUILT_INS:
            return capture_of(expression)
        case _:
            return ExpressionSource(expression)


def _cut(expression: Expression, max_bytes: int) -> Expression:
    """Return an expression with a length for the strings that it may be, not for those that it only tests."""
    match expression:
        case StringAt(argument, None):
            return StringAt(argument, Literal(max_bytes))
        case Conditional(condition, then, otherwise):
            return Conditional(condition, _cut(then, max_bytes), _cut(otherwise, max_bytes))
        case _:
            return expression
