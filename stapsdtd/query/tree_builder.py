"""Builds the syntax tree of an expression, checks the types of its parts, and bounds its size.

What an engine can test becomes a `Comparison`: an argument or a field, masked or not, and a constant.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import cast

from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.model import MAX_STRING_BYTES
from stapsdtd.query.byte_order import SIZES
from stapsdtd.query.compile import MAX_TESTS
from stapsdtd.query.expression import (
    STRING_FIELDS,
    And,
    ArgumentValue,
    Arithmetic,
    BytesAt,
    Calculation,
    Cgroup,
    Compared,
    Comparison,
    Condition,
    Conditional,
    Expression,
    Field,
    Literal,
    Matched,
    Not,
    Operator,
    Or,
    StringAt,
)
from stapsdtd.query.literals import ALL_BITS, float_value, negated, number_value, string_value
from stapsdtd.query.nodes import (
    Kind,
    Node,
    Token,
    check_operand,
    check_sides,
    merged_mask,
    no_cgroup,
    subject_of,
    wrong_comm,
)
from stapsdtd.query.numbers import folded
from stapsdtd.query.parse_error import ParseError, correction, quoted

FindCgroup = Callable[[str], CgroupInfo | None]
"""Looks up a cgroup by path; returns None if there is none."""

MAX_DEPTH = 32
MAX_OPERATIONS = 128
MAX_GLOB_BYTES = 256
"""Of all of an expression's globs: what it takes to match one grows with its length times the string's."""

_FIELDS = {field.value: field for field in Field} | {"comm": Field.EXECNAME}
_NAMES = f"arg0, arg1, …, {', '.join(field.value for field in Field)}"
_ARGUMENT = re.compile(r"arg(\d{1,3})")
_NUMBERS = (int, float)
_ARITHMETIC = {each.value: each for each in Arithmetic}
_MIRRORED = {
    Operator.EQ: Operator.EQ, Operator.NE: Operator.NE, Operator.LT: Operator.GT,
    Operator.LE: Operator.GE, Operator.GT: Operator.LT, Operator.GE: Operator.LE,
}  # fmt: skip


class TreeBuilder:
    """Of one expression. Each method takes an operator and its operands, and raises ParseError."""

    def __init__(self, find_cgroup: FindCgroup) -> None:
        self._find_cgroup = find_cgroup
        self._comparisons = 0
        self._operations = 0
        self._glob_bytes = 0

    def condition(self, node: Node) -> Condition:
        """Return a node as a condition; a number is true unless it is 0."""
        return cast("Condition", self._condition(node).expression)

    def negation(self, node: Node) -> Node:
        inner = self._condition(node)
        if isinstance(inner.expression, Not):
            return Node(inner.expression.operand, Kind.CONDITION, inner.column, depth=inner.depth - 1)
        return self._nest(Not(self.condition(inner)), Kind.CONDITION, [inner])

    def conjunction(self, nodes: Sequence[Node]) -> Node:
        conditions = [self._condition(node) for node in nodes]
        return self._nest(And(tuple(map(self.condition, conditions))), Kind.CONDITION, conditions)

    def disjunction(self, nodes: Sequence[Node]) -> Node:
        conditions = [self._condition(node) for node in nodes]
        return self._nest(Or(tuple(map(self.condition, conditions))), Kind.CONDITION, conditions)

    def conditional(self, which: Node, then: Node, otherwise: Node) -> Node:
        which = self._condition(which)
        if then.kind is not otherwise.kind:
            raise ParseError(f"this is {otherwise.kind.value}, and what ? chooses else {then.kind.value}",
                             otherwise.column)  # fmt: skip
        self._count_operation(which.column)
        expression = Conditional(self.condition(which), then.expression, otherwise.expression)
        return self._nest(expression, then.kind, [which, then, otherwise])

    def _nest(self, expression: Expression, kind: Kind, parts: list[Node]) -> Node:
        deepest = max(parts, key=lambda part: part.depth)
        if deepest.depth == MAX_DEPTH:
            raise ParseError(f"conditions are nested more than {MAX_DEPTH} levels deep", deepest.column)
        return Node(expression, kind, parts[0].column, depth=deepest.depth + 1)

    def _condition(self, node: Node) -> Node:
        if node.kind is Kind.CONDITION:
            return node
        if node.literal is not None:
            raise ParseError("a constant is not a condition; compare it with arg0, pid, execname, …", node.column)
        if node.kind.is_text:
            raise ParseError(f'{node.name} is not a condition; write {node.name} == "…"', node.column)
        return self._compare(node, Operator.NE, Node(Literal(0), Kind.NUMBER, node.column))

    def _compare(self, left: Node, how: Operator, right: Node) -> Node:
        """Compare numbers, the left one not a constant, or strings, or bytes."""
        self._comparisons += 1
        if self._comparisons > MAX_TESTS:
            raise ParseError(f"too many comparisons; the limit is {MAX_TESTS}", left.column)
        subject, number = subject_of(left.expression), right.literal
        if subject is not None and isinstance(number, int):
            comparison: Condition = Comparison(subject[0], how, number, subject[1])
        else:
            comparison = Compared(how, left.value, right.value)
        return Node(comparison, Kind.CONDITION, left.column, depth=max(left.depth, right.depth))

    def comparison(self, left: Node, relation: Token, right: Node) -> Node:
        column, how = relation.column, Operator(relation.kind)
        check_sides(left, right, column)
        if left.literal is not None:
            left, how, right = right, _MIRRORED[how], left
        if left.kind.is_text and how not in {Operator.EQ, Operator.NE}:
            raise ParseError(f"strings and bytes support only == and !=, not {relation.kind}", column)
        text = right.literal
        if isinstance(text, bytes) and left.expression in {Field.EXECNAME, Field.CGROUP}:
            self._comparisons += 1
            if self._comparisons > MAX_TESTS:
                raise ParseError(f"too many comparisons; the limit is {MAX_TESTS}", left.column)
            return self._compare_field(left, how, text, right.column)
        return self._compare(left, how, right)

    def _compare_field(self, left: Node, how: Operator, text: bytes, column: int) -> Node:
        if left.expression is Field.CGROUP:
            comparison = Comparison(Field.CGROUP, how, self._cgroup(text, column))
        else:
            reason = wrong_comm(text)
            if reason is not None:
                raise ParseError(reason, column)
            comparison = Comparison(Field.EXECNAME, how, text)
        return Node(comparison, Kind.CONDITION, left.column)

    def _cgroup(self, text: bytes, column: int) -> Cgroup:
        path = text.decode(errors="surrogateescape")
        cgroup = self._find_cgroup(path)
        if cgroup is None:
            raise ParseError(no_cgroup(path), column)
        return Cgroup(path, cgroup.id, cgroup.level)

    def match(self, left: Node, tilde: Token, right: Node) -> Node:
        column, pattern = tilde.column, right.literal
        if not left.kind.is_text or left.literal is not None:
            raise ParseError('~ compares a string with a glob, as in str(arg0) ~ "SELECT*"', column)
        if not isinstance(pattern, bytes):
            raise ParseError('~ takes a glob in quotes, such as "SELECT*"', right.column)
        self._glob_bytes += len(pattern)
        if self._glob_bytes > MAX_GLOB_BYTES:
            raise ParseError(f"an expression's globs are limited to {MAX_GLOB_BYTES} bytes in all", right.column)
        self._count_operation(left.column)
        return Node(Matched(left.value, pattern), Kind.CONDITION, left.column, depth=left.depth)

    def calculation(self, left: Node, operator: Token, right: Node) -> Node:
        how, column = _ARITHMETIC[operator.kind], operator.column
        for node in (left, right):
            check_operand(node, how, column)
        depth = max(left.depth, right.depth)
        one, other = left.literal, right.literal
        if other == 0 and (how is Arithmetic.DIVIDE or how is Arithmetic.REMAINDER):
            raise ParseError("division by 0", right.column)
        if isinstance(one, _NUMBERS) and isinstance(other, _NUMBERS):
            return Node(Literal(folded(how, one, other)), Kind.NUMBER, left.column)
        if how is Arithmetic.AND and (bits := merged_mask(left.expression, right.expression)) is not None:
            return Node(bits, Kind.NUMBER, left.column, left.name, depth)
        self._count_operation(column)
        expression = Calculation(how, left.value, right.value)
        return Node(expression, Kind.NUMBER, left.column, depth=depth)

    def _count_operation(self, column: int) -> None:
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise ParseError(f"too many operations; the limit is {MAX_OPERATIONS}", column)

    def minus(self, sign: Token, operand: Node) -> Node:
        column = sign.column
        if isinstance(operand.literal, int | float):
            return Node(Literal(negated(operand.literal, column)), Kind.NUMBER, column)
        return self.calculation(Node(Literal(0), Kind.NUMBER, column), sign, operand)

    def inverse(self, tilde: Token, operand: Node) -> Node:
        column = tilde.column
        if isinstance(operand.literal, int):
            return Node(Literal(folded(Arithmetic.XOR, operand.literal, ALL_BITS)), Kind.NUMBER, column)
        flip = Token(Arithmetic.XOR.value, tilde.text, column)
        return self.calculation(operand, flip, Node(Literal(ALL_BITS), Kind.NUMBER, column))._replace(column=column)

    def call(self, name: Token, arguments: Sequence[Node]) -> Node:
        column = name.column
        match name.text, arguments:
            case "str", [Node(ArgumentValue() as argument, name=pointer)]:
                return Node(StringAt(argument), Kind.STRING, column, f"str({pointer})")
            case "str", [Node(ArgumentValue() as argument, name=pointer), Node(kind=Kind.NUMBER) as length]:
                most = length.literal
                if most is not None and not (isinstance(most, int) and 1 <= most <= MAX_STRING_BYTES):
                    raise ParseError(f"str takes a length of 1 to {MAX_STRING_BYTES} bytes", length.column)
                self._count_operation(column)
                string = StringAt(argument, length.value)
                return Node(string, Kind.STRING, column, f"str({pointer}, …)", length.depth)
            case "str", _:
                raise ParseError("str takes an argument of the probe, and a length: str(arg0) or str(arg0, 64)", column)
            case "buf", [Node(ArgumentValue() as argument, name=pointer), length]:
                size = length.literal
                if not (isinstance(size, int) and 1 <= size <= MAX_STRING_BYTES):
                    raise ParseError(f"buf takes a constant length of 1 to {MAX_STRING_BYTES} bytes", length.column)
                self._count_operation(column)
                return Node(BytesAt(argument, size), Kind.BYTES, column, f"buf({pointer}, {size})")
            case turning, [operand] if turning in SIZES:
                return self._turned(turning, column, operand)
            case turning, _ if turning in SIZES:
                raise ParseError(f"{turning} takes a number: {turning}(arg0)", column)
            case "buf", _:
                raise ParseError("buf takes an argument of the probe, and a length: buf(arg0, 16)", column)
            case _:
                if hint := correction(name.text):
                    raise ParseError(f"unexpected {quoted(name.text)}{hint}", column)
                functions = f"str(arg0), str(arg0, length), buf(arg0, length) and, of a number, {', '.join(SIZES)}"
                raise ParseError(f"unknown function {quoted(name.text)}; there are {functions}", column)

    def _turned(self, function: str, column: int, operand: Node) -> Node:
        """On a big-endian host, network byte order is its own."""
        if operand.kind is not Kind.NUMBER:
            raise ParseError(f"{operand.name} is {operand.kind.value}; {function} takes numbers", operand.column)
        if isinstance(operand.literal, float):
            raise ParseError(f"{function} takes integers", operand.column)
        bits = 8 * SIZES[function]
        swaps = sys.byteorder == "little"
        how, right = (Arithmetic.SWAP, 64 - bits) if swaps else (Arithmetic.AND, (1 << bits) - 1)
        call = Token(how.value, function, column)
        node = self.calculation(operand, call, Node(Literal(right), Kind.NUMBER, column))
        return node._replace(column=column, name=f"{function}({operand.name})")

    def name(self, token: Token) -> Node:
        _, text, column = token
        argument = _ARGUMENT.fullmatch(text)
        if argument is not None:
            return Node(ArgumentValue(int(argument[1])), Kind.NUMBER, column, text)
        if text in _FIELDS:
            field = _FIELDS[text]
            return Node(field, Kind.STRING if field in STRING_FIELDS else Kind.NUMBER, column, text)
        if hint := correction(text):
            raise ParseError(f"unexpected {quoted(text)}{hint}", column)
        raise ParseError(f"unknown name {quoted(text)}; the names are {_NAMES}, and strings need quotes", column)

    def number(self, token: Token) -> Node:
        _, text, column = token
        value = float_value(text, column) if "." in text else number_value(text, column)
        return Node(Literal(value), Kind.NUMBER, column)

    def string(self, token: Token) -> Node:
        return Node(Literal(string_value(token.text, token.column)), Kind.STRING, token.column)
