"""SQL without its literals, so that statements that differ in nothing else are one.

    SELECT name FROM users  WHERE id = 42 -- by Anne   ──►  SELECT name FROM users WHERE id = ?
    INSERT INTO log VALUES (1, 'a'), (2, 'it''s');     ──►  INSERT INTO log VALUES (?)
    SELECT 1 FROM t WHERE id IN ($1, NULL, 0x1F)       ──►  SELECT ? FROM t WHERE id IN (?)

This reads tokens and no grammar: a statement may be cut at any place, and each database has its own dialect. In `sql`,
as PostgreSQL and the standard have it, a string ends at the next single quote that is not doubled, a backslash before
it matters in E'…' alone, and comments nest. In `mysql`, backslashes and double quotes are of strings, and # begins a
comment.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NUMBER = r"""
    0[xX][0-9a-fA-F_]+ | 0[bB][01_]+ | 0[oO][0-7_]+ | (?:\d[\d_]*+\.?[\d_]*+|\.\d[\d_]*+)(?:[eE][+-]?\d[\d_]*)?
"""
_ESCAPED = r"(?:[^{quote}\\]|{quote}{quote}|\\.?)*(?:{quote}|\Z)"
_DIALECTS = {
    "sql": rf"""
    (?P<space>   \s+ | --[^\n]* )
  | (?P<comment> /\* )
  | (?P<literal> [eE]'{_ESCAPED.format(quote="'")}
               | (?:[nNbBxX]|[uU]&)?'(?:[^']|'')*(?:'|\Z)
               | \$(?P<tag>(?:[^\W\d]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z)
               | {_NUMBER} | \$\d+ | \? )
  | (?P<name>    (?:[uU]&)?"[^"]*(?:"|\Z) | [^\W\d][\w$]* | `[^`]*(?:`|\Z) )
  | (?P<other>   . )
    """,
    "mysql": rf"""
    (?P<space>   \s+ | --(?=[\s;\#-]|/\*|\Z)[^\n]* | \#[^\n]* | /\*.*?(?:\*/|\Z) )
  | (?P<literal> [nNbBxX]?'{_ESCAPED.format(quote="'")} | "{_ESCAPED.format(quote='"')} | {_NUMBER} | \? )
  | (?P<name>    [^\W\d][\w$]* | `[^`]*(?:`|\Z) )
  | (?P<other>   . )
    """,
}
DIALECTS = tuple(_DIALECTS)
_TOKENS = {name: re.compile(pattern, re.DOTALL | re.VERBOSE) for name, pattern in _DIALECTS.items()}
_COMMENT_MARK = re.compile(r"/\*|\*/")
_BEFORE_SIGN = frozenset("(,=<>+-*/|") | frozenset(
    ["AND", "BETWEEN", "BY", "ELSE", "IN", "LIMIT", "NOT", "OFFSET", "OR", "SELECT", "THEN", "WHEN", "WHERE"]
)
_WORDS = frozenset(["NULL", "TRUE", "FALSE"])
"""Literals of lists. Elsewhere they are part of the statement, as in IS NULL."""


class _Token(NamedTuple):
    text: str
    is_spaced: bool


def normalized(statement: str, dialect: str = "sql") -> str:
    """Return a statement with `?` in place of literals and of lists of them, and one space in place of many."""
    tokens: list[_Token] = []
    is_spaced = False
    position, find = 0, _TOKENS[dialect]
    while match := find.match(statement, position):
        position = match.end()
        if match.lastgroup in {"space", "comment"}:
            is_spaced = True
            if match.lastgroup == "comment":
                position = _end_of_comment(statement, position)
            continue
        _append(tokens, _Token("?" if match["literal"] is not None else match[0], is_spaced))
        is_spaced = False
    while tokens and tokens[-1].text == ";":
        tokens.pop()
    return "".join(" " + token.text if token.is_spaced else token.text for token in tokens).strip()


def _end_of_comment(statement: str, position: int) -> int:
    """Return where a comment ends that others may be nested in. position: within it."""
    depth = 1
    for mark in _COMMENT_MARK.finditer(statement, position):
        depth += 1 if mark[0] == "/*" else -1
        if not depth:
            return mark.end()
    return len(statement)


def _append(tokens: list[_Token], token: _Token) -> None:
    if (
        token.text in {",", ")"}
        and len(tokens) > 1
        and tokens[-1].text.upper() in _WORDS
        and tokens[-2].text in {"(", ","}
    ):
        _append(tokens, _Token("?", tokens.pop().is_spaced))
    if token.text == "?":
        while not token.is_spaced and _ends_with_sign(tokens):
            token = _Token("?", tokens.pop().is_spaced)
        if _texts(tokens, 2) == ["?", ","]:
            tokens.pop()
            return
    tokens.append(token)
    if token.text == ")" and _texts(tokens, 7) == ["(", "?", ")", ",", "(", "?", ")"]:
        del tokens[-4:]


def _ends_with_sign(tokens: list[_Token]) -> bool:
    """Report whether a sign stands where a value is to come, so that it is not between two."""
    if not tokens or tokens[-1].text not in {"+", "-"}:
        return False
    return len(tokens) > 1 and tokens[-2].text.upper() in _BEFORE_SIGN


def _texts(tokens: list[_Token], count: int) -> list[str]:
    return [token.text for token in tokens[-count:]]
