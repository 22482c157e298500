"""SQL without its literals, so that statements that differ in nothing else are one.

    SELECT name FROM users  WHERE id = 42 -- by Anne   ──►  SELECT name FROM users WHERE id = ?
    INSERT INTO log VALUES (1, 'a'), (2, 'it''s');     ──►  INSERT INTO log VALUES (?)

This reads tokens and no grammar: a statement may be cut at any place, and each database has its own dialect. A string
in single quotes ends at the next single quote that is not doubled; a backslash before it matters in E'…' alone.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space>   (?: \s | --[^\n]* | /\*.*?(?:\*/|\Z) )+ )
  | (?P<literal> [eE]'(?:[^'\\]|''|\\.?)*(?:'|\Z)
               | [nNbBxX]?'(?:[^']|'')*(?:'|\Z)
               | \$(?P<tag>(?:[^\W\d]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z)
               | 0[xX][0-9a-fA-F]+ | (?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)? | \? )
  | (?P<name>    [^\W\d][\w$]* | "[^"]*(?:"|\Z) | `[^`]*(?:`|\Z) | \$\d+ )
  | (?P<other>   . )
    """,
    re.DOTALL | re.VERBOSE,
)
_BEFORE_SIGN = frozenset("(,=<>+-*/|") | frozenset(
    ["AND", "BETWEEN", "BY", "ELSE", "IN", "LIMIT", "NOT", "OFFSET", "OR", "SELECT", "THEN", "WHEN", "WHERE"]
)


class _Token(NamedTuple):
    text: str
    is_spaced: bool


def normalized(statement: str) -> str:
    """Return a statement with `?` in place of literals and of lists of them, and one space in place of many."""
    tokens: list[_Token] = []
    is_spaced = False
    for match in _TOKEN.finditer(statement):
        if match.lastgroup == "space":
            is_spaced = True
            continue
        token = _Token("?" if match["literal"] is not None else match[0], is_spaced)
        _append(tokens, token)
        is_spaced = False
    while tokens and tokens[-1].text == ";":
        tokens.pop()
    return "".join(" " + token.text if token.is_spaced else token.text for token in tokens).strip()


def _append(tokens: list[_Token], token: _Token) -> None:
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
