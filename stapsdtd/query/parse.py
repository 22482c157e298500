"""Parse the expression language of predicates.

    arg0 > 100 && (pid == 7 || execname == "psql")
    arg1 & 0x40                                       short for (arg1 & 0x40) != 0
    !(uid == 0) && cgroup == "/system.slice"

Operators by increasing precedence: `||`, `&&`, `!`, comparisons, `&`. So `arg0 & 4 == 4` means `(arg0 & 4) == 4`,
unlike in C, and `!arg0 == 1` means `!(arg0 == 1)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from lark import Lark, Token, Transformer_NonRecursive, UnexpectedCharacters, UnexpectedToken, v_args
from lark.exceptions import VisitError

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Expression, Field, Not, Operator, Or
from stapsdtd.query.literals import number_value, string_value
from stapsdtd.query.parse_error import ParseError, correction, quoted, unexpected_character, unexpected_token
from stapsdtd.query.program import MAX_TESTS

FindCgroup = Callable[[str], CgroupInfo | None]
"""Looks up a cgroup by path; returns None if there is none."""

MAX_LENGTH = 4096
MAX_DEPTH = 32
MAX_COMM_BYTES = 15

_GRAMMAR = r"""
start: disjunction
?disjunction: conjunction ("||" conjunction)*
?conjunction: negated ("&&" negated)*
?negated: "!" negated -> negation
    | comparison
?comparison: masked
    | comparison RELATION masked
?masked: atom
    | masked AMPERSAND atom -> mask
?atom: NAME -> name
    | NUMBER -> number
    | STRING -> string
    | "(" disjunction ")"

RELATION: /==|!=|<=|>=|<|>/
AMPERSAND: "&"
NAME: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /-?[0-9][A-Za-z0-9_]*/
STRING: /"([^"\\]|\\.)*"|'([^'\\]|\\.)*'/s
%ignore /\s+/
"""

_FIELDS = {field.value: field for field in Field} | {"comm": Field.EXECNAME}
_STRING_FIELDS = frozenset({Field.EXECNAME, Field.CGROUP})
_NAMES = "arg0, arg1, …, pid, tid, uid, gid, execname and cgroup"
_ARGUMENT = re.compile(r"arg(\d{1,3})")
_MIRRORED = {
    Operator.EQ: Operator.EQ, Operator.NE: Operator.NE, Operator.LT: Operator.GT,
    Operator.LE: Operator.GE, Operator.GT: Operator.LT, Operator.GE: Operator.LE,
}  # fmt: skip


def parse(text: str, find_cgroup: FindCgroup, field: str = "where") -> Expression:
    """Raises InvalidArgumentError, which names the column, if text is not a valid expression."""
    if len(text) > MAX_LENGTH:
        raise InvalidArgumentError(
            field, f"expressions are limited to {MAX_LENGTH} characters; this one has {len(text)}"
        )
    try:
        return _parse(text, find_cgroup)
    except ParseError as error:
        raise InvalidArgumentError(field, error.reason, error.column, text) from None


def _parse(text: str, find_cgroup: FindCgroup) -> Expression:
    try:
        tree = _parser().parse(text)
    except UnexpectedCharacters as error:
        raise unexpected_character(error, text) from None
    except UnexpectedToken as error:
        raise unexpected_token(error, text) from None
    try:
        condition = _TreeBuilder(find_cgroup).transform(tree)
    except VisitError as error:
        raise error.orig_exc from None
    return condition.expression


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", lexer="basic")


@dataclass(frozen=True, slots=True)
class _Subject:
    """A property of the hit, not compared yet."""

    subject: Field | ArgumentValue
    name: str
    column: int
    mask: int | None = None

    @property
    def is_string(self) -> bool:
        return self.subject in _STRING_FIELDS


@dataclass(frozen=True, slots=True)
class _Number:
    value: int
    column: int


@dataclass(frozen=True, slots=True)
class _String:
    value: bytes
    column: int


@dataclass(frozen=True, slots=True)
class _Condition:
    """depth: number of `!`, `&&` and `||` around its innermost comparison."""

    expression: Expression
    column: int
    depth: int = 0


_Node = _Subject | _Number | _String | _Condition


@v_args(inline=True)
class _TreeBuilder(Transformer_NonRecursive[Token, _Condition]):
    """Each method receives the results for its rule's parts. Not recursive, so it copes with any depth of nesting."""

    def __init__(self, find_cgroup: FindCgroup) -> None:
        super().__init__()
        self._find_cgroup = find_cgroup
        self._comparisons = 0

    def start(self, node: _Node) -> _Condition:
        return self._condition(node)

    def negation(self, node: _Node) -> _Condition:
        inner = self._condition(node)
        if isinstance(inner.expression, Not):
            return replace(inner, expression=inner.expression.operand, depth=inner.depth - 1)
        return self._nest(Not(inner.expression), [inner])

    def conjunction(self, *nodes: _Node) -> _Condition:
        conditions = [self._condition(node) for node in nodes]
        return self._nest(And(tuple(condition.expression for condition in conditions)), conditions)

    def disjunction(self, *nodes: _Node) -> _Condition:
        conditions = [self._condition(node) for node in nodes]
        return self._nest(Or(tuple(condition.expression for condition in conditions)), conditions)

    def _nest(self, expression: Expression, parts: list[_Condition]) -> _Condition:
        deepest = max(parts, key=lambda part: part.depth)
        if deepest.depth == MAX_DEPTH:
            raise ParseError(f"conditions are nested more than {MAX_DEPTH} levels deep", deepest.column)
        return _Condition(expression, parts[0].column, deepest.depth + 1)

    def _condition(self, node: _Node) -> _Condition:
        match node:
            case _Condition():
                return node
            case _Subject() if node.is_string:
                raise ParseError(f'{node.name} is not a condition; write {node.name} == "…"', node.column)
            case _Subject():
                return self._compare(node, Operator.NE, 0)
            case _Number() | _String():
                raise ParseError("a constant is not a condition; compare it with arg0, pid, execname, …", node.column)

    def _compare(self, subject: _Subject, operator: Operator, value: int | bytes | Cgroup) -> _Condition:
        self._comparisons += 1
        if self._comparisons > MAX_TESTS:
            raise ParseError(f"too many comparisons; the limit is {MAX_TESTS}", subject.column)
        return _Condition(Comparison(subject.subject, operator, value, subject.mask), subject.column)

    def comparison(self, left: _Node, relation: Token, right: _Node) -> _Condition:
        operator_column = relation.start_pos or 0
        operator = Operator(str(relation))
        if isinstance(left, _Condition):
            raise ParseError("the left side is already a condition; combine conditions with && or ||", operator_column)
        match left, right:
            case _, _Condition():
                raise ParseError("this is already a condition; combine conditions with && or ||", right.column)
            case _Subject(), _Subject():
                raise ParseError(
                    f"{right.name} cannot be compared with {left.name}, only with a constant", right.column
                )
            case _Subject(), _Number() | _String():
                return self._compare(left, operator, self._constant(left, operator, right, operator_column))
            case _Number() | _String(), _Subject():
                return self._compare(right, _MIRRORED[operator], self._constant(right, operator, left, operator_column))
            case _:
                raise ParseError("one side of a comparison must be arg0, pid, execname, …", left.column)

    def _constant(
        self, subject: _Subject, operator: Operator, constant: _Number | _String, operator_column: int
    ) -> int | bytes | Cgroup:
        if isinstance(constant, _Number):
            if subject.is_string:
                raise ParseError(f'{subject.name} is a string; write {subject.name} == "…"', constant.column)
            return constant.value
        if not subject.is_string:
            raise ParseError(f"{subject.name} is a number and cannot be compared with a string", constant.column)
        if operator not in {Operator.EQ, Operator.NE}:
            raise ParseError(f"strings support only == and !=, not {operator.value}", operator_column)
        if subject.subject is Field.CGROUP:
            return self._cgroup(constant)
        reason = wrong_comm(constant.value)
        if reason is not None:
            raise ParseError(reason, constant.column)
        return constant.value

    def _cgroup(self, constant: _String) -> Cgroup:
        path = constant.value.decode(errors="surrogateescape")
        cgroup = self._find_cgroup(path)
        if cgroup is None:
            raise ParseError(no_cgroup(path), constant.column)
        return Cgroup(path, cgroup.id, cgroup.level)

    def mask(self, left: _Node, ampersand: Token, right: _Node) -> _Subject:
        match left, right:
            case (_Subject() as subject, _Number() as number) | (_Number() as number, _Subject() as subject):
                if subject.is_string:
                    raise ParseError(f"{subject.name} is a string, which has no bits for &", subject.column)
                bits = number.value % (1 << 64)
                return replace(subject, mask=bits if subject.mask is None else bits & subject.mask)
            case _:
                raise ParseError(
                    "& selects bits of a number, as in arg0 & 0x40; combine conditions with &&",
                    ampersand.start_pos or 0,
                )

    def name(self, token: Token) -> _Subject:
        text, column = str(token), token.start_pos or 0
        argument = _ARGUMENT.fullmatch(text)
        if argument is not None:
            return _Subject(ArgumentValue(int(argument[1])), text, column)
        if text in _FIELDS:
            return _Subject(_FIELDS[text], text, column)
        hint = correction(text) or f"; the names are {_NAMES}, and strings need quotes"
        raise ParseError(f"unknown name {quoted(text)}{hint}", column)

    def number(self, token: Token) -> _Number:
        column = token.start_pos or 0
        return _Number(number_value(str(token), column), column)

    def string(self, token: Token) -> _String:
        column = token.start_pos or 0
        return _String(string_value(str(token), column), column)


def wrong_comm(name: bytes) -> str | None:
    """Return why no process can have this command name; None if one can."""
    if b"\0" in name:
        return "command names cannot contain NUL"
    if len(name) > MAX_COMM_BYTES:
        prefix = name[:MAX_COMM_BYTES].decode(errors="backslashreplace")
        return f'the kernel cuts command names to {MAX_COMM_BYTES} bytes, and this has {len(name)}; write "{prefix}"'
    return None


def no_cgroup(path: str) -> str:
    return f"no such cgroup: {quoted(path)}; write its path as shown after 0:: in /proc/PID/cgroup"
