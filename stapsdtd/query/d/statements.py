"""Parse the statements of a D clause, and its predicate. Precedence is C's; ^^ is between && and ||.

    if (arg0 > 1) { x = arg0 ? 1 : 2; self->n[pid]++; } @[execname] = sum((int)arg1);

Expressions are parsed in one pass and without recursion: operands that are complete wait in one stack, operators and
what was opened in another. An operator takes its operands when one that binds no tighter follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from stapsdtd.query.d.declared_types import parse_type
from stapsdtd.query.d.errors import DError, DSyntaxError
from stapsdtd.query.d.functions import REFUSED_VARIABLES
from stapsdtd.query.d.literals import character_value, integer_of, string_value
from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Branch,
    Call,
    Cast,
    Conditional,
    Expression,
    Integer,
    Macro,
    Member,
    Position,
    Scope,
    Statement,
    Step,
    String,
    Unary,
    Variable,
    walk,
)
from stapsdtd.query.d.values import STRING_BYTES, size_of

MAX_DEPTH = 64

# one of them matches everywhere, so that nothing is looked at again; groups are not possessive because of CPython's
# gh-106052, until 3.11.5
_TOKEN = re.compile(
    r"""(?:\s|/\*.*?\*/)*(?:
        (?P<scope>(?:self|this)\s*+->)
      | (?P<name>[A-Za-z_`]\w*+)
      | (?P<integer>(?:0[xX][0-9a-fA-F]++|\d++)[uUlL]*+)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*")
      | (?P<character>'(?:[^'\\\n]|\\[^\n])+')
      | (?P<aggregation>@(?:[A-Za-z_]\w*+)?)
      | (?P<macro>\${1,2}(?:[A-Za-z]++|\d++))
      | (?P<members>(?:->|\.)\s*+[A-Za-z_]\w*+(?:\s*+(?:(?:->|\.)\s*+[A-Za-z_]\w*+|\[\s*+\d++\s*+\]))*)
      | (?P<assignment>(?:<<|>>|[-+*/%&|^])?=(?!=))
      | (?P<mark>\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\^\^|[-+*/%&|^~!<>?:;,(){}[\]])
      | (?P<end>\Z)
      | (?P<wrong>.)
    )""",
    re.DOTALL | re.VERBOSE,
)
_TYPE = re.compile(
    r"unsigned|signed|char|short|int|long|string|void|(?:u?int(?:8|16|32|64)|size|ssize|u?intptr|pid|id|uid|gid|off)_t"
)
_CAST = re.compile(r"\(\s*+((?:(?:struct|union|enum)\s++)?[A-Za-z_]\w*+)\s*+(?:((?:\*\s*+)++)\)|\)\s*+(?=[\w\"'$@(]))")
"""Or what can be nothing else, whatever the type is."""
_SCOPES = {"self": Scope.SELF, "this": Scope.THIS}

# what binds tighter has a higher level
_OPENED, _ASSIGNMENT, _ELSE, _OR, _UNARY = 0, 1, 2, 3, 14
_BINARY = (
    ("||",), ("^^",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
_LEVELS = {operator: level for level, same in enumerate(_BINARY, _OR) for operator in same}
_STEPS = frozenset({"++", "--"})
_PREFIX = frozenset({"-", "+", "!", "~", "*"}) | _STEPS


class _Token(NamedTuple):
    """kind: the name of a group, or a mark itself."""

    kind: str
    text: str
    offset: int


class _Operand(NamedTuple):
    """begin: where it begins, with the parentheses around it."""

    expression: Expression
    begin: int


class _Waiting(NamedTuple):
    """An operator that waits for operands, or what was opened.

    text: of the operator, or the name in front of what was opened. first: the position of its first operand.
    """

    level: int
    kind: str
    text: str
    begin: int
    first: int
    scope: Scope = Scope.GLOBAL


def _tokens(text: str, begin: int, end: int) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text, begin, end):
        kind = match.lastgroup or ""
        yield _Token(match[kind] if kind == "mark" else kind, match[kind], match.start(kind))
        if kind == "end":
            return


class StatementParser:
    """Of a part of a program. Its methods raise DError."""

    def __init__(
        self, text: str, begin: int, end: int, at: Callable[[int], Position], string_bytes: int = STRING_BYTES
    ) -> None:
        """at: returns the position of an offset in text. string_bytes: sizeof (string)."""
        self._string_bytes = string_bytes
        self._at = at
        self._text = text
        self._tokens = _tokens(text, begin, end)
        self._token = next(self._tokens)
        self._operands: list[_Operand] = []
        self._waiting: list[_Waiting] = []

    def parse(self) -> tuple[Statement, ...]:
        statements = self._statements(1)
        if self._token.kind != "end":
            raise self._unexpected()
        for statement in statements:
            for node, depth in walk(statement):
                if depth > MAX_DEPTH:
                    raise _nested_too_deep(node.at)
        return statements

    def _take(self) -> _Token:
        token = self._token
        if token.kind != "end":
            self._token = next(self._tokens)
        return token

    def _expect(self, kind: str) -> _Token:
        if self._token.kind != kind:
            raise self._unexpected()
        return self._take()

    def _unknown_type(self, name: str, token: _Token) -> DError:
        return DError(
            f"type {name} is not known: types are integers, pointers to them and string, and structures are not read; "
            "of kernel functions' arguments there are members, such as args[0]->f_pos",
            self._at(token.offset),
        )

    def _unexpected(self) -> DError:
        if reason := _REFUSED.get(self._token.kind):
            return DError(f"{self._token.text}: {reason}", self._at(self._token.offset))
        where = "the end of the clause" if self._token.kind == "end" else f'"{self._token.text}"'
        return DSyntaxError(f"syntax error near {where}", self._at(self._token.offset))

    def _statements(self, depth: int) -> tuple[Statement, ...]:
        """depth: of these statements, from 1."""
        statements: list[Statement] = []
        while self._token.kind not in {"}", "end"}:
            if self._token.kind == ";":
                self._take()
            elif self._token.text == "if":
                statements.append(self._branch(depth))
            else:
                statements.append(self._expression())
                if self._token.kind not in {";", "}", "end"}:
                    raise self._unexpected()
        return tuple(statements)

    def _branch(self, depth: int) -> Branch:
        at = self._at(self._take().offset)
        if depth > MAX_DEPTH:
            raise _nested_too_deep(at)
        self._expect("(")
        condition = self._expression()
        self._expect(")")
        then = self._block(depth + 1)
        otherwise: tuple[Statement, ...] = ()
        if self._token.text == "else":
            self._take()
            is_chained = self._token.text == "if"
            otherwise = (self._branch(depth + 1),) if is_chained else self._block(depth + 1)
        return Branch(condition, then, otherwise, at)

    def _block(self, depth: int) -> tuple[Statement, ...]:
        self._expect("{")
        statements = self._statements(depth)
        self._expect("}")
        return statements

    def _expression(self) -> Expression:
        """Take an expression, and nothing behind it."""
        wants_operand: bool | None = True
        while wants_operand is not None:
            wants_operand = self._operand() if wants_operand else self._behind_operand()
        return self._operands.pop().expression

    def _operand(self) -> bool:
        """Take what an operand begins with. Return whether one is still expected."""
        if self._token.kind == ")" and self._waiting and self._waiting[-1].kind == "call":
            if self._waiting[-1].first < len(self._operands):
                raise self._unexpected()
            self._close()
            return False
        if self._token.kind not in {*_PREFIX, *_LEAVES, "(", "scope", "name", "aggregation"}:
            raise self._unexpected()
        token = self._take()
        if token.kind in _PREFIX:
            self._push(_UNARY, token.kind, token)
        elif token.kind == "(" and not _is_type(self._token):
            if match := _CAST.match(self._text, token.offset):
                name, stars = " ".join(match[1].split()), "".join((match[2] or "").split())
                raise self._unknown_type(f"{name} {stars}".rstrip(), token)
            self._push(_OPENED, "(", token)
        elif token.kind == "(":
            self._push(_UNARY, "cast", token._replace(text=self._type()))
        elif token.kind == "name" and token.text == "sizeof":
            at = self._at(token.offset)
            self._expect("(")
            self._add(Integer(size_of(parse_type(self._type(), at), self._string_bytes), "ul", at), token.offset)
            return False
        elif token.kind in _LEAVES:
            self._add(_LEAVES[token.kind](token.text, self._at(token.offset)), token.offset)
            return False
        else:
            return self._named(token)
        return True

    def _named(self, token: _Token) -> bool:
        """Take what follows the beginning of a variable, an aggregation or a call."""
        scope, name = Scope.GLOBAL, token.text
        if token.kind == "scope":
            scope, name = _SCOPES[token.text[:4]], self._expect("name").text
        kind = "aggregation" if token.kind == "aggregation" else "variable"
        if token.kind == "name" and self._token.kind == "(":
            kind = "call"
        elif self._token.kind != "[":
            if self._token.kind == "members" and name in REFUSED_VARIABLES:
                raise DError(f"{name}: {REFUSED_VARIABLES[name]}", self._at(token.offset))
            self._add(self._made(kind, name.removeprefix("@"), scope, (), self._at(token.offset)), token.offset)
            return False
        self._take()
        self._waiting.append(_Waiting(_OPENED, kind, name.removeprefix("@"), token.offset, len(self._operands), scope))
        return True

    def _made(
        self, kind: str, name: str, scope: Scope, parts: tuple[Expression, ...], at: Position
    ) -> Variable | Aggregation | Call:
        if kind == "call":
            return Call(name, parts, at)
        return Variable(name, scope, parts, at) if kind == "variable" else Aggregation(name, parts, at)

    def _type(self) -> str:
        """Take a type, and the parenthesis behind it."""
        words = []
        while _is_type(self._token):
            words.append(self._take().text)
        if not words and self._token.kind == "name":
            token = self._take()
            tag = f" {self._token.text}" if token.text in {"struct", "union", "enum"} else ""
            raise self._unknown_type(token.text + tag, token)
        if not words:
            raise self._unexpected()
        while self._token.kind == "*":
            words.append(self._take().text)
        self._expect(")")
        return " ".join(words)

    def _behind_operand(self) -> bool | None:
        """Take what is behind an operand. Return whether another one is expected; None where the expression ends."""
        token = self._token
        if token.kind in _STEPS:
            target, begin = self._operands.pop()
            self._add(Step(token.kind, target, is_postfix=True, at=self._at(begin)), begin)
            self._take()
            return False
        if token.kind in _LEVELS:
            self._reduce(_LEVELS[token.kind])
            self._push(_LEVELS[token.kind], token.kind, self._take(), has_left=True)
            return True
        if token.kind == "assignment":
            self._reduce(_UNARY)
            if self._waiting and self._waiting[-1].level > _ASSIGNMENT:
                raise self._unexpected()
            self._push(_ASSIGNMENT, token.text, self._take(), has_left=True)
            return True
        if token.kind == "?":
            self._reduce(_OR)
            self._push(_OPENED, "?", self._take(), has_left=True)
            return True
        self._reduce(_ASSIGNMENT)
        return self._behind_part(token)

    def _behind_part(self, token: _Token) -> bool | None:
        """Take what ends a part of what was opened."""
        if not self._waiting:
            return None
        opened = self._waiting[-1]
        if token.kind == ":" and opened.kind == "?":
            self._waiting[-1] = opened._replace(level=_ELSE)
        elif token.kind == "," and opened.kind in {"call", "variable", "aggregation"}:
            pass
        elif token.kind == _CLOSING.get(opened.kind):
            self._close()
            return False
        else:
            raise self._unexpected()
        self._take()
        return True

    def _close(self) -> None:
        """Take a closing parenthesis or bracket, and members behind it."""
        self._take()
        _, kind, name, begin, first, scope = self._waiting.pop()
        if kind == "(":
            self._operands[-1] = self._operands[-1]._replace(begin=begin)
            return
        parts = tuple(part.expression for part in self._operands[first:])
        del self._operands[first:]
        made: Expression = self._made(kind, name, scope, parts, self._at(begin))
        if self._token.kind == "members" and isinstance(made, Variable) and scope is Scope.GLOBAL:
            made = Member(made, "".join(self._take().text.split()), self._at(begin))
        self._add(made, begin)

    def _add(self, expression: Expression, begin: int) -> None:
        self._operands.append(_Operand(expression, begin))

    def _push(self, level: int, kind: str, token: _Token, *, has_left: bool = False) -> None:
        first = len(self._operands) - has_left
        begin = self._operands[first].begin if has_left else token.offset
        self._waiting.append(_Waiting(level, kind, token.text, begin, first))

    def _reduce(self, level: int) -> None:
        """Give their operands to the operators of this level or above."""
        while self._waiting and self._waiting[-1].level >= level:
            operator = self._waiting.pop()
            parts = [part.expression for part in self._operands[operator.first :]]
            del self._operands[operator.first :]
            self._add(_built(operator, parts, self._at(operator.begin)), operator.begin)


_REFUSED = {
    "members": "only args[] of kernel functions have members, such as args[0]->f_pos; other structures are not read",
    "&": "addresses of variables cannot be taken",
}
_CLOSING = {"(": ")", "call": ")", "variable": "]", "aggregation": "]"}
_LEAVES: dict[str, Callable[[str, Position], Expression]] = {
    "integer": integer_of,
    "character": lambda text, at: Integer(character_value(text, at), at=at),
    "string": lambda text, at: String(string_value(text), at),
    "macro": lambda text, at: Macro(text[1:], at),
}


def _built(operator: _Waiting, parts: list[Expression], at: Position) -> Expression:
    if operator.level == _ASSIGNMENT:
        target, value = parts
        return Assignment(operator.kind, target, value, at)
    if operator.level == _ELSE:
        condition, then, otherwise = parts
        return Conditional(condition, then, otherwise, at)
    if operator.level != _UNARY:
        left, right = parts
        return Binary(operator.kind, left, right, at)
    (operand,) = parts
    if operator.kind == "cast":
        return Cast(operator.text, operand, at)
    return (
        Step(operator.kind, operand, is_postfix=False, at=at)
        if operator.kind in _STEPS
        else Unary(operator.kind, operand, at)
    )


def _is_type(token: _Token) -> bool:
    return token.kind == "name" and _TYPE.fullmatch(token.text) is not None


def _nested_too_deep(at: Position) -> DSyntaxError:
    return DSyntaxError(f"nested more than {MAX_DEPTH} levels deep", at)
