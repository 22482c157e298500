"""Say what is wrong with an expression, and where.

arg0 = 1             unexpected '='; write ==
arg0 == 1 and pid    unexpected 'and'; expected an operator (==, &&, …); write &&
(pid == 1            missing closing parenthesis
"""

from __future__ import annotations

_CORRECTIONS = {"and": "&&", "or": "||", "not": "!", "AND": "&&", "OR": "||", "NOT": "!", "=": "=="}
_MAX_QUOTED = 40


class ParseError(Exception):
    """What is wrong with an expression, and at which column, counted from 0."""

    def __init__(self, reason: str, column: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


def correction(text: str) -> str:
    """Return the end of a message that says how other languages' operators are written here; "" for other words."""
    return f"; write {_CORRECTIONS[text]}" if text in _CORRECTIONS else ""


def quoted(text: str) -> str:
    """Return text as it can be shown in a message, shortened if it is long."""
    return repr(str(text) if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…")
