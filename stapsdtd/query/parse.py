"""The text that users write, into an expression.

    arg0 > 100 && (pid == 7 || execname == "psql")
    arg1 & 0x40                                       as (arg1 & 0x40) != 0
    !(uid == 0) && cgroup == "/system.slice"

From the loosest to the tightest: `||`, `&&`, `!`, comparisons, `&`. So `arg0 & 4 == 4` is `(arg0 & 4) == 4`, where C
has `arg0 & (4 == 4)`, and `!arg0 == 1` is `!(arg0 == 1)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from lark import Lark, Token, Transformer_NonRecursive, UnexpectedCharacters, UnexpectedToken, v_args
from lark.exceptions import VisitError

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Expression, Field, Not, Operator, Or
from stapsdtd.query.program import MAX_TESTS

FindCgroup = Callable[[str], CgroupInfo | None]
"""From a path to the cgroup there, None where there is none."""

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
_KNOWN = "arg0, arg1, …, pid, tid, uid, gid, execname and cgroup"
_ARGUMENT = re.compile(r"arg(\d{1,3})")
_NUMBER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_NUMBERS = range(-(1 << 63), 1 << 64)
_MOST_DIGITS = 22
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"\\": b"\\", '"': b'"', "'": b"'", "n": b"\n", "t": b"\t"}
_MIRRORED = {
    Operator.EQ: Operator.EQ, Operator.NE: Operator.NE, Operator.LT: Operator.GT,
    Operator.LE: Operator.GE, Operator.GT: Operator.LT, Operator.GE: Operator.LE,
}  # fmt: skip
_INSTEAD = {"and": "&&", "or": "||", "not": "!", "AND": "&&", "OR": "||", "NOT": "!", "=": "==", "|": "||"}
_WORD_NOT = re.compile(r"\b(not|NOT)\s*\Z")
_SHOWN = 40


def parse(text: str, find_cgroup: FindCgroup, field: str = "where") -> Expression:
    """Raise InvalidArgumentError, which names the column, for what is not an expression."""
    if len(text) > MAX_LENGTH:
        raise InvalidArgumentError(field, f"an expression has at most {MAX_LENGTH} characters, this one {len(text)}")
    try:
        return _understood(text, find_cgroup)
    except _WrongError as error:
        raise InvalidArgumentError(field, error.reason, error.column, text) from None


class _WrongError(Exception):
    def __init__(self, reason: str, column: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.column = column


def _understood(text: str, find_cgroup: FindCgroup) -> Expression:
    try:
        tree = _parser().parse(text)
    except UnexpectedCharacters as error:
        at = cast("int", error.pos_in_stream)
        raise _WrongError(_unexpected(text[at]), at) from None
    except UnexpectedToken as error:
        raise _misplaced(error, text) from None
    try:
        condition = _Reader(find_cgroup).transform(tree)
    except VisitError as error:
        raise error.orig_exc from None
    return condition.expression


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", lexer="basic")


def _unexpected(character: str) -> str:
    if character in "\"'":
        return "the string that begins here does not end"
    return f"{_shown(character)} cannot stand here" + _instead(character)


def _misplaced(error: UnexpectedToken, text: str) -> _WrongError:
    found: Token = error.token
    at = len(text) if found.type == "$END" else found.start_pos or 0
    negation = _WORD_NOT.search(text, 0, at)
    if negation is not None:
        return _WrongError(f"{_shown(negation[1])} cannot stand here" + _instead(negation[1]), negation.start(1))
    wants_operand = "NAME" in error.expected
    wanted = "a name (arg0, pid, execname, …), a number or a string" if wants_operand else "an operator (==, &&, …)"
    if found.type == "$END":
        if wants_operand:
            return _WrongError(f"it ends where {wanted} should follow", at)
        return _WrongError("it ends before a parenthesis is closed", at)
    if found.type == "RPAR" and not wants_operand:
        return _WrongError("there is no parenthesis that this one closes", at)
    return _WrongError(f"{_shown(found)} stands where {wanted} should" + _instead(found), at)


def _instead(found: str) -> str:
    return f"; write {_INSTEAD[found]}" if found in _INSTEAD else ""


def _shown(text: str) -> str:
    return repr(str(text) if len(text) <= _SHOWN else text[:_SHOWN] + "…")


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a hit is asked for, before it is compared."""

    what: Field | ArgumentValue
    name: str
    column: int
    mask: int | None = None

    @property
    def is_string(self) -> bool:
        return self.what in _STRING_FIELDS


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
    """depth: how many of `!`, `&&` and `||` are around its innermost comparison."""

    expression: Expression
    column: int
    depth: int = 0


_Node = _Subject | _Number | _String | _Condition


@v_args(inline=True)
class _Reader(Transformer_NonRecursive[Token, _Condition]):
    """Each method gets what a rule's parts became. No text is too deep for it: it goes on without recursion."""

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
        return self._deeper(Not(inner.expression), [inner])

    def conjunction(self, *nodes: _Node) -> _Condition:
        conditions = [self._condition(node) for node in nodes]
        return self._deeper(And(tuple(condition.expression for condition in conditions)), conditions)

    def disjunction(self, *nodes: _Node) -> _Condition:
        conditions = [self._condition(node) for node in nodes]
        return self._deeper(Or(tuple(condition.expression for condition in conditions)), conditions)

    def _deeper(self, expression: Expression, parts: list[_Condition]) -> _Condition:
        deepest = max(parts, key=lambda part: part.depth)
        if deepest.depth == MAX_DEPTH:
            raise _WrongError(f"conditions are nested more than {MAX_DEPTH} deep here", deepest.column)
        return _Condition(expression, parts[0].column, deepest.depth + 1)

    def _condition(self, node: _Node) -> _Condition:
        match node:
            case _Condition():
                return node
            case _Subject() if node.is_string:
                raise _WrongError(f'{node.name} alone says nothing; write {node.name} == "…"', node.column)
            case _Subject():
                return self._compared(node, Operator.NE, 0)
            case _Number() | _String():
                raise _WrongError("this alone says nothing; compare it with arg0, pid, execname, …", node.column)

    def _compared(self, subject: _Subject, operator: Operator, value: int | bytes | Cgroup) -> _Condition:
        self._comparisons += 1
        if self._comparisons > MAX_TESTS:
            raise _WrongError(f"this is one comparison more than the {MAX_TESTS} that are possible", subject.column)
        return _Condition(Comparison(subject.what, operator, value, subject.mask), subject.column)

    def comparison(self, left: _Node, relation: Token, right: _Node) -> _Condition:
        at = relation.start_pos or 0
        operator = Operator(str(relation))
        if isinstance(left, _Condition):
            raise _WrongError("what stands before this is a condition already; combine conditions with && or ||", at)
        match left, right:
            case _, _Condition():
                raise _WrongError("this is a condition already; combine conditions with && or ||", right.column)
            case _Subject(), _Subject():
                raise _WrongError(
                    f"{right.name} cannot be compared with {left.name}, only with a constant", right.column
                )
            case _Subject(), _Number() | _String():
                return self._compared(left, operator, self._constant(left, operator, right, at))
            case _Number() | _String(), _Subject():
                return self._compared(right, _MIRRORED[operator], self._constant(right, operator, left, at))
            case _:
                raise _WrongError("neither side of the comparison is arg0, pid, execname, …", left.column)

    def _constant(
        self, subject: _Subject, operator: Operator, constant: _Number | _String, operator_column: int
    ) -> int | bytes | Cgroup:
        if isinstance(constant, _Number):
            if subject.is_string:
                raise _WrongError(f'{subject.name} is a string: {subject.name} == "…"', constant.column)
            return constant.value
        if not subject.is_string:
            raise _WrongError(f"{subject.name} is a number, and cannot be compared with a string", constant.column)
        if operator not in {Operator.EQ, Operator.NE}:
            raise _WrongError(f"strings are compared with == and != only, not with {operator.value}", operator_column)
        if subject.what is Field.CGROUP:
            return self._cgroup(constant)
        reason = wrong_comm(constant.value)
        if reason is not None:
            raise _WrongError(reason, constant.column)
        return constant.value

    def _cgroup(self, constant: _String) -> Cgroup:
        path = constant.value.decode(errors="surrogateescape")
        found = self._find_cgroup(path)
        if found is None:
            raise _WrongError(no_cgroup(path), constant.column)
        return Cgroup(path, found.id, found.level)

    def mask(self, left: _Node, ampersand: Token, right: _Node) -> _Subject:
        match left, right:
            case (_Subject() as subject, _Number() as number) | (_Number() as number, _Subject() as subject):
                if subject.is_string:
                    raise _WrongError(f"{subject.name} is a string, which has no bits for &", subject.column)
                bits = number.value % (1 << 64)
                return replace(subject, mask=bits if subject.mask is None else bits & subject.mask)
            case _:
                raise _WrongError(
                    "& takes bits of a number, as in arg0 & 0x40; conditions are combined with &&",
                    ampersand.start_pos or 0,
                )

    def name(self, token: Token) -> _Subject:
        text, column = str(token), token.start_pos or 0
        argument = _ARGUMENT.fullmatch(text)
        if argument is not None:
            return _Subject(ArgumentValue(int(argument[1])), text, column)
        if text in _FIELDS:
            return _Subject(_FIELDS[text], text, column)
        instead = _instead(text) or f"; there are {_KNOWN}, and strings stand in quotes"
        raise _WrongError(f"{_shown(text)} is not known{instead}", column)

    def number(self, token: Token) -> _Number:
        text, column = str(token), token.start_pos or 0
        found = _NUMBER.fullmatch(text)
        if found is None:
            raise _WrongError(f"{_shown(text)} is no number; write 255, 0xff or 0o377", column)
        minus, hexadecimal, octal, decimal = found.groups()
        digits, base = next((digits, base) for digits, base in ((hexadecimal, 16), (octal, 8), (decimal, 10)) if digits)
        # int() refuses decimals of thousands of digits, with a message of its own
        value = int(digits, base) if len(digits.lstrip("0")) <= _MOST_DIGITS else _NUMBERS.stop
        value = -value if minus else value
        if value not in _NUMBERS:
            raise _WrongError(f"{_shown(text)} does not fit into 64 bits", column)
        return _Number(value, column)

    def string(self, token: Token) -> _String:
        column = token.start_pos or 0
        parts: list[bytes] = []
        inside = str(token)[1:-1]
        end = 0
        for escape in _ESCAPE.finditer(inside):
            parts.append(inside[end : escape.start()].encode(errors="surrogatepass"))
            end = escape.end()
            parts.append(_unescaped(escape, column + 1 + escape.start()))
        parts.append(inside[end:].encode(errors="surrogatepass"))
        return _String(b"".join(parts), column)


def _unescaped(escape: re.Match[str], column: int) -> bytes:
    sign = escape[1]
    if len(sign) > 1:
        return bytes([int(sign[1:], 16)])
    if sign not in _ESCAPED:
        raise _WrongError(f"{_shown(escape[0])} is no escape; a backslash is written twice", column)
    return _ESCAPED[sign]


def wrong_comm(name: bytes) -> str | None:
    """Answer why no process can have a command name; None where one can."""
    if b"\0" in name:
        return "a command name has no NUL in it"
    if len(name) > MAX_COMM_BYTES:
        cut = name[:MAX_COMM_BYTES].decode(errors="backslashreplace")
        return f'the kernel cuts command names to {MAX_COMM_BYTES} bytes, and this has {len(name)}; write "{cut}"'
    return None


def no_cgroup(path: str) -> str:
    return f"there is no cgroup {_shown(path)}; write its path as /proc/PID/cgroup shows it behind 0::"
