"""What of a condition a site decides, whatever the hit: `name == "entry" || arg0 > 5` is nothing to test at an entry.

So one filter can be about several probes, and about arguments that some of them lack.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from stapsdtd.globs import matches
from stapsdtd.model import Site
from stapsdtd.query.evaluate import site_text
from stapsdtd.query.expression import (
    And,
    Compared,
    Comparison,
    Condition,
    Expression,
    Field,
    Literal,
    Matched,
    Not,
    Operator,
    Or,
    walk,
)

NEVER = Comparison(Field.TID, Operator.EQ, -1)

_OF_SITE = frozenset({Field.PROVIDER, Field.FUNCTION, Field.NAME})
"""A module's name is its object's, which a site does not know."""


def at_site(condition: Condition, site: Site) -> Condition | None:
    """Return what is left to require of hits: None if nothing is, and NEVER if no hit satisfies it."""
    if not _is_about_sites(condition):
        return condition
    folded = _folded(condition, site)
    return None if folded is True else NEVER if folded is False else folded


@lru_cache(maxsize=1 << 8)
def _is_about_sites(condition: Condition) -> bool:
    return any(isinstance(each, Field) and each in _OF_SITE for each in walk(condition))


def _folded(condition: Condition, site: Site) -> Condition | bool:
    match condition:
        case Compared(Operator.EQ | Operator.NE as operator, left, right):
            one, other = _text(left, site), _text(right, site)
            return condition if one is None or other is None else (one == other) is (operator is Operator.EQ)
        case Matched(subject, pattern):
            text = _text(subject, site)
            return condition if text is None else matches(text, pattern)
        case Not(operand):
            inner = _folded(operand, site)
            return not inner if isinstance(inner, bool) else Not(inner)
        case And(operands):
            return _joined(And, operands, site, stop=False)
        case Or(operands):
            return _joined(Or, operands, site, stop=True)
        case _:
            return condition


def _joined(join: type[And | Or], operands: Iterable[Condition], site: Site, *, stop: bool) -> Condition | bool:
    """Leave out the operands that decide nothing, and those behind one that decides all.

    That one stays behind others, any of which may be unavailable, and the whole with it.
    """
    kept: list[Condition] = []
    for operand in operands:
        folded = _folded(operand, site)
        if not isinstance(folded, bool):
            kept.append(folded)
        elif folded is stop:
            if not kept:
                return stop
            kept.append(operand)
            break
    if not kept:
        return not stop
    return kept[0] if len(kept) == 1 else join(tuple(kept))


def _text(value: Expression, site: Site) -> bytes | None:
    """Return a string that is the same at all hits of a site, None for other values."""
    match value:
        case Field() if value in _OF_SITE:
            return site_text(value, site, "")
        case Literal(bytes(text)):
            return text
        case _:
            return None
