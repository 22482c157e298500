r"""Parse the expression language of filters, keys and values.

    arg0 > 100 && (pid == 7 || execname == "psql")
    arg1 & 0x40                                       short for (arg1 & 0x40) != 0
    !(uid == 0) && cgroup == "/system.slice"
    (arg1 - arg0) / 1000 >= 5
    str(arg0) ~ "SELECT *" || str(arg1, arg2) == "main"
    buf(arg0, 4) == "\x7fELF"
    arg2 ? arg0 > 5 : arg1 > 5

Operators by increasing precedence: `? :`, `||`, `&&`, `!`, comparisons and `~`, `|`, `^`, `&`, shifts, `+ -`, `* / %`,
and in front of a value `-` and `~`. So `arg0 & 4 == 4` means `(arg0 & 4) == 4`, unlike in C, and `!arg0 == 1` means
`!(arg0 == 1)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

from lark import Lark, UnexpectedCharacters, UnexpectedToken
from lark.exceptions import VisitError

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.query.expression import Condition, Expression
from stapsdtd.query.nodes import Node
from stapsdtd.query.parse_error import ParseError, unexpected_character, unexpected_token
from stapsdtd.query.tree_builder import FindCgroup, TreeBuilder

MAX_LENGTH = 4096
_Parsed = TypeVar("_Parsed", bound=Expression)

_GRAMMAR = r"""
start: expression
?expression: disjunction
    | disjunction "?" expression ":" expression -> conditional
?disjunction: conjunction ("||" conjunction)*
?conjunction: negated ("&&" negated)*
?negated: "!" negated -> negation
    | comparison
?comparison: union
    | comparison RELATION union
    | comparison TILDE union -> match
?union: exclusive
    | union VERTICAL_BAR exclusive -> calculation
?exclusive: masked
    | exclusive CARET masked -> calculation
?masked: shifted
    | masked AMPERSAND shifted -> calculation
?shifted: sum
    | shifted SHIFT sum -> calculation
?sum: product
    | sum PLUS product -> calculation
    | sum MINUS product -> calculation
?product: unary
    | product FACTOR unary -> calculation
?unary: MINUS unary -> minus
    | TILDE unary -> inverse
    | atom
?atom: NAME -> name
    | NAME "(" (expression ("," expression)*)? ")" -> call
    | NUMBER -> number
    | STRING -> string
    | "(" expression ")"

SHIFT.1: /<<|>>/
RELATION: /==|!=|<=|>=|<|>/
VERTICAL_BAR: "|"
CARET: "^"
AMPERSAND: "&"
PLUS: "+"
MINUS: "-"
FACTOR: /[*\/%]/
TILDE: "~"
NAME: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /[0-9][A-Za-z0-9_]*(\.[0-9]+)?/
STRING: /"([^"\\]|\\.)*"|'([^'\\]|\\.)*'/s
%ignore /\s+/
"""


def parse(text: str, find_cgroup: FindCgroup, field: str = "where") -> Condition:
    """Parse a condition. Raises InvalidArgumentError, which names the column, if text is not a valid one."""
    return _parse(text, find_cgroup, field, TreeBuilder.condition)


def parse_value(text: str, find_cgroup: FindCgroup, field: str = "value") -> Expression:
    """Like parse, for any expression: a number, a string, bytes, or a condition."""
    return _parse(text, find_cgroup, field, lambda _, node: node.expression)


def parse_number(text: str, find_cgroup: FindCgroup, field: str = "value") -> Expression:
    """Like parse_value, for a number, or a condition, whose value is 1 or 0."""
    return _parse(text, find_cgroup, field, _number)


def _number(builder: TreeBuilder, node: Node) -> Expression:
    del builder
    if node.kind.is_text:
        raise ParseError(f"{node.name} is {node.kind.value}, and a number is needed", node.column)
    return node.expression


def _parse(text: str, find_cgroup: FindCgroup, field: str, finish: Callable[[TreeBuilder, Node], _Parsed]) -> _Parsed:
    if len(text) > MAX_LENGTH:
        raise InvalidArgumentError(
            field, f"expressions are limited to {MAX_LENGTH} characters; this one has {len(text)}"
        )
    builder = TreeBuilder(find_cgroup)
    try:
        return finish(builder, _tree(text, builder))
    except ParseError as error:
        raise InvalidArgumentError(field, error.reason, error.column, text) from None


def _tree(text: str, builder: TreeBuilder) -> Node:
    try:
        tree = _parser().parse(text)
    except UnexpectedCharacters as error:
        raise unexpected_character(error, text) from None
    except UnexpectedToken as error:
        raise unexpected_token(error, text) from None
    try:
        return builder.transform(tree)
    except VisitError as error:
        raise error.orig_exc from None


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", lexer="basic")
