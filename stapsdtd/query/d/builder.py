"""Builds the syntax tree of statements from the parser's."""

from __future__ import annotations

import re

from lark import Token, Transformer_NonRecursive, v_args
from lark.tree import Meta

from stapsdtd.query.d.declared_types import parse_type
from stapsdtd.query.d.errors import DSyntaxError
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
)
from stapsdtd.query.d.values import size_of

_GREATEST = (1 << 64) - 1
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11}
_SCOPES = {"self": Scope.SELF, "this": Scope.THIS}


def _at(meta: Meta | Token) -> Position:
    # the parser sets both of everything that has a token
    return Position(meta.line or 0, meta.column or 0)


@v_args(meta=True)
class Builder(Transformer_NonRecursive[Token, object]):
    """Each method receives the results for its rule's parts. Not recursive, so it copes with any depth of nesting."""

    def statements(self, meta: Meta, parts: list[Statement]) -> tuple[Statement, ...]:  # noqa: ARG002
        return tuple(parts)

    def branch(self, meta: Meta, parts: list[object]) -> Branch:
        condition, then, *otherwise = parts
        return Branch(condition, then, otherwise[0] if otherwise else (), _at(meta))  # type: ignore[arg-type]

    def otherwise(self, meta: Meta, parts: list[object]) -> tuple[Statement, ...]:  # noqa: ARG002
        (part,) = parts
        return (part,) if isinstance(part, Branch) else part  # type: ignore[return-value]

    def assignment(self, meta: Meta, parts: list[Expression]) -> Assignment:
        target, operator, value = parts
        return Assignment(str(operator), target, value, _at(meta))

    def plain_assignment(self, meta: Meta, parts: list[Expression]) -> Assignment:
        target, value = parts
        return Assignment("=", target, value, _at(meta))

    def conditional(self, meta: Meta, parts: list[Expression]) -> Conditional:
        condition, then, otherwise = parts
        return Conditional(condition, then, otherwise, _at(meta))

    def binary(self, meta: Meta, parts: list[Expression]) -> Binary:
        left, operator, right = parts
        return Binary(str(operator), left, right, _at(meta))

    def prefix(self, meta: Meta, parts: list[Expression]) -> Unary:
        operator, operand = parts
        return Unary(str(operator), operand, _at(meta))

    def prefix_step(self, meta: Meta, parts: list[Expression]) -> Step:
        operator, target = parts
        return Step(str(operator), target, is_postfix=False, at=_at(meta))

    def postfix_step(self, meta: Meta, parts: list[Expression]) -> Step:
        target, operator = parts
        return Step(str(operator), target, is_postfix=True, at=_at(meta))

    def type(self, meta: Meta, parts: list[Token]) -> str:  # noqa: ARG002
        return " ".join(parts)

    def cast(self, meta: Meta, parts: list[object]) -> Cast:
        name, operand = parts
        return Cast(name, operand, _at(meta))  # type: ignore[arg-type]

    def size(self, meta: Meta, parts: list[str]) -> Integer:
        _, name = parts
        return Integer(size_of(parse_type(name, _at(meta))), "ul", _at(meta))

    def integer(self, meta: Meta, parts: list[Token]) -> Integer:
        (token,) = parts
        digits = token.rstrip("uUlL")
        suffix = token[len(digits) :].lower()
        is_octal = digits.startswith("0") and digits.isdigit() and len(digits) > 1
        try:
            value = int(digits, 8 if is_octal else 0)
        except ValueError:
            raise DSyntaxError(f"invalid digit in octal constant {digits}", _at(meta)) from None
        if value > _GREATEST:
            raise DSyntaxError(f"integer constant is too large: {digits}", _at(meta))
        return Integer(value, suffix, _at(meta))

    def character(self, meta: Meta, parts: list[Token]) -> Integer:
        content = _unescaped(parts[0][1:-1])
        if len(content) > 8:
            raise DSyntaxError("character constant has more than 8 characters", _at(meta))
        return Integer(int.from_bytes(content, "big"), at=_at(meta))

    def string(self, meta: Meta, parts: list[Token]) -> String:
        return String(_unescaped(parts[0][1:-1]), _at(meta))

    def macro(self, meta: Meta, parts: list[Token]) -> Macro:
        return Macro(parts[0][1:], _at(meta))

    def variable(self, meta: Meta, parts: list[Token]) -> Variable:
        return Variable(str(parts[0]), at=_at(meta))

    def element(self, meta: Meta, parts: list[Expression]) -> Variable:
        name, *keys = parts
        return Variable(str(name), keys=tuple(keys), at=_at(meta))

    def member(self, meta: Meta, parts: list[Expression]) -> Member:
        name, *keys, path = parts
        variable = Variable(str(name), keys=tuple(keys), at=_at(meta))
        return Member(variable, "".join(str(path).split()), _at(meta))

    def scoped(self, meta: Meta, parts: list[Token]) -> Variable:
        scope, name = parts
        return Variable(str(name), _SCOPES[scope[:4]], at=_at(meta))

    def scoped_element(self, meta: Meta, parts: list[Expression]) -> Variable:
        scope, name, *keys = parts
        return Variable(str(name), _SCOPES[str(scope)[:4]], tuple(keys), _at(meta))

    def aggregation(self, meta: Meta, parts: list[Expression]) -> Aggregation:
        name, *keys = parts
        return Aggregation(str(name)[1:], tuple(keys), _at(meta))

    def call(self, meta: Meta, parts: list[Expression]) -> Call:
        name, *arguments = parts
        return Call(str(name), tuple(arguments), _at(meta))


def _unescaped(text: str) -> bytes:
    content, end = bytearray(), 0
    for escape in _ESCAPE.finditer(text):
        content += text[end : escape.start()].encode(errors="surrogateescape")
        content += _escape(escape[1])
        end = escape.end()
    return bytes(content + text[end:].encode(errors="surrogateescape"))


def _escape(code: str) -> bytes:
    if code[0] == "x" and len(code) > 1:
        return bytes([int(code[1:], 16)])
    if code[0] in "01234567":
        return bytes([int(code, 8) & 0xFF])
    return bytes([_ESCAPED[code]]) if code in _ESCAPED else code.encode()
