"""Say what is wrong with an expression, and where.

    arg0 = 1             unexpected '='; write ==
    arg0 == 1 and pid    unexpected 'and'; expected an operator (==, &&, …); write &&
    (pid == 1            missing closing parenthesis

The messages here are those for text that does not follow the grammar.
"""

from __future__ import annotations

import re
from typing import cast

from lark import Token, UnexpectedCharacters, UnexpectedToken

_CORRECTIONS = {"and": "&&", "or": "||", "not": "!", "AND": "&&", "OR": "||", "NOT": "!", "=": "=="}
_WORD_NOT = re.compile(r"\b(not|NOT)\s*\Z")
_MAX_QUOTED = 40


class ParseError(Exception):
    """What is wrong with an expression, and at which column, counted from 0."""

    def __init__(self, reason: str, column: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


def unexpected_character(error: UnexpectedCharacters, text: str) -> ParseError:
    column = cast("int", error.pos_in_stream)
    character = text[column]
    if character in "\"'":
        return ParseError("unterminated string", column)
    return ParseError(f"unexpected {quoted(character)}" + correction(character), column)


def unexpected_token(error: UnexpectedToken, text: str) -> ParseError:
    token: Token = error.token
    column = len(text) if token.type == "$END" else token.start_pos or 0
    negation = _WORD_NOT.search(text, 0, column)
    if negation is not None:
        return ParseError(f"unexpected {quoted(negation[1])}" + correction(negation[1]), negation.start(1))
    wants_operand = "NAME" in error.expected
    expected = "a name (arg0, pid, execname, …), a number or a string" if wants_operand else "an operator (==, &&, …)"
    if token.type == "$END":
        if wants_operand:
            return ParseError(f"unexpected end; expected {expected}", column)
        if "COLON" in error.expected:
            return ParseError("unexpected end; ? needs a : and what to choose else", column)
        return ParseError("missing closing parenthesis", column)
    if token.type == "RPAR" and not wants_operand:
        return ParseError("unmatched closing parenthesis", column)
    return ParseError(f"unexpected {quoted(token)}; expected {expected}" + correction(token), column)


def correction(text: str) -> str:
    """Return the end of a message that says how other languages' operators are written here; "" for other words."""
    return f"; write {_CORRECTIONS[text]}" if text in _CORRECTIONS else ""


def quoted(text: str) -> str:
    """Return text as it can be shown in a message, shortened if it is long."""
    return repr(str(text) if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…")
