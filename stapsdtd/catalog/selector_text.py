r"""How selectors are written: parts between colons, then a list of captures. A part in double quotes is literal.

    postgresql:query__*(arg0:str)               provider, name with a glob, captures
    paren:"a(b)"                                the name a(b), rather than captures of a
    ts:"&HttpSM::state_read"(arg0)              a name with colons
    "nodejs1234":"/opt/a:b":"":"star*"          the provider nodejs1234, a path, no function, the name star*
    esc:"\x1b[31mred \"\\\""                    backslash escapes

A part is in quotes if it begins with one; elsewhere a quote is a character like others. In quotes, a backslash escapes
what would end them or cannot be printed: `\"`, `\\`, `\n`, `\t`, `\r`, and code points in hex as `\xNN`, `\uNNNN` and
`\UNNNNNNNN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.runtime.text import escape

_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_PLAIN = re.compile(r"[^:(]*+")
_BACKSLASH = re.compile(
    r'\\(?:(?P<letter>["\\ntr])|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<other>.))',
    re.DOTALL,
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}
_SPECIAL = re.compile(r'[:(*?[]|\A"|\A\s|\s\Z')
_LAST_CODE_POINT = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Part:
    """text: without quotes and escapes. column: where it begins, from 0."""

    text: str
    column: int
    is_quoted: bool = False


def parts_of(text: str, field: str) -> tuple[list[Part], int]:
    """Return the parts of a selector, and where they end: at the parenthesis of its captures, or at its end.

    Raises InvalidArgumentError, with the column, for quotes that are not closed, and escapes that there are not.
    """
    parts, column = [], 0
    while True:
        if text.startswith('"', column):
            part, column = _quoted(text, column, field)
        else:
            plain = _PLAIN.match(text, column)
            part, column = Part(plain[0] if plain else "", column), plain.end() if plain else column
        parts.append(part)
        if not text.startswith(":", column):
            return parts, column
        column += 1


def _quoted(text: str, column: int, field: str) -> tuple[Part, int]:
    match = _QUOTED.match(text, column)
    if match is None:
        raise InvalidArgumentError(field, 'the quote is not closed; within quotes, write \\" for one', column, text)
    end = match.end()
    if end < len(text) and text[end] not in ":(":
        expected = "a colon, a parenthesis or the end is expected after a closing quote"
        raise InvalidArgumentError(field, expected, end, text)

    def character(escaped: re.Match[str]) -> str:
        if letter := escaped["letter"]:
            return _LETTERS.get(letter, letter)
        digits = escaped["x"] or escaped["u"] or escaped["U"]
        code_point = int(digits, 16) if digits else -1
        if not 0 <= code_point <= _LAST_CODE_POINT or 0xD800 <= code_point <= 0xDFFF:
            what = "is no character" if digits else "is no escape"
            known = r"""there are \" \\ \n \t \r \xNN \uNNNN and \UNNNNNNNN"""
            raise InvalidArgumentError(field, f"{escaped[0]} {what}; {known}", column + 1 + escaped.start(), text)
        return chr(code_point)

    return Part(_BACKSLASH.sub(character, match[1]), column, is_quoted=True), end


def head_of(text: str) -> str:
    """Return a selector without its captures; all of it if it is none."""
    try:
        _, end = parts_of(text, "")
    except InvalidArgumentError:
        return text
    return text[:end]


def captures_in(text: str) -> str | None:
    """Return what is in the parentheses of a selector; None if it has no captures."""
    head = head_of(text)
    return text[len(head) + 1 :].rpartition(")")[0] if len(head) < len(text) else None


def if_of_name(text: str) -> str:
    """Return how to write a selector if its parenthesis is part of the name, as the end of a message.

    >>> print(if_of_name("paren:a(b)"))
    ; if the name has the parenthesis, write paren:"a(b)"
    """
    if '"' in text:
        return ""
    begin = head_of(text).find(":") + 1
    return f"; if the name has the parenthesis, write {text[:begin]}{quoted(text[begin:])}"


def quoted(text: str) -> str:
    r"""Return a part that matches this text alone.

    >>> print(quoted('a "b"'), quoted("line\n"))
    "a \"b\"" "line\n"
    """
    return '"' + escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def as_part(text: str) -> str:
    """Return a part that matches this text, in quotes if it needs them. Without, `-` and `__` match each other.

    >>> print(as_part("query__start"), as_part("a b"), as_part("a(b)"))
    query__start a b "a(b)"
    """
    return text if text and text.isprintable() and not _SPECIAL.search(text) else quoted(text)


def probe_name(provider: str, name: str) -> str:
    """Return `provider:name` as a selector that matches the probe."""
    return f"{as_part(provider)}:{as_part(name)}"


def exact_selector(provider: str, path: str, name: str) -> str:
    """Return a selector that matches one probe of one file alone."""
    return f"{quoted(provider)}:{quoted(path)}::{quoted(name)}"
