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

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn, TypeVar, cast

from stapsdtd.config.request_limits import TOO_MANY_PARTS, RequestBudget
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.query.expression import Condition, Expression, Operator
from stapsdtd.query.nodes import Node, Token
from stapsdtd.query.parse_error import ParseError, correction, quoted
from stapsdtd.query.tree_builder import FindCgroup, TreeBuilder

MAX_LENGTH = 4096

_T = TypeVar("_T")
_Part = TypeVar("_Part", bound=Expression)

_NAME, _CALL, _NUMBER, _STRING, _END = "name", "call", "number", "string", "end"
# one of them matches everywhere, so that nothing is looked at again; a call takes in the parenthesis behind its name
_TOKEN = re.compile(
    r"""\s*+(?:
        (?P<call>[A-Za-z_][A-Za-z0-9_]*+)\s*+\(
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*+)
      | (?P<number>[0-9][A-Za-z0-9_]*+(?:\.[0-9]++)?)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<mark><<|>>|==|!=|<=|>=|&&|\|\||[-+*/%&|^~<>!?:(),])
      | (?P<end>\Z)
      | (?P<wrong>.)
    )""",
    re.DOTALL | re.VERBOSE,
)

# what binds tighter has a higher level
_OPENED, _ELSE, _OR, _AND, _NOT, _COMPARISON, _UNARY = 0, 1, 2, 3, 4, 5, 12
_CALCULATIONS = (("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "%"))
_INFIX = (
    {"||": _OR, "&&": _AND, "~": _COMPARISON}
    | {each.value: _COMPARISON for each in Operator}
    | {each: level for level, same in enumerate(_CALCULATIONS, _COMPARISON + 1) for each in same}
)
_PREFIX = {"!": _NOT, "-": _UNARY, "~": _UNARY}
_JOINED = frozenset({_OR, _AND})


def _tokens(text: str) -> Iterator[Token]:
    """Yield the tokens, the last of which is _END. Raises ParseError at a character that begins none."""
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or _END
        found, column = match[kind], match.start(kind)
        if kind == "wrong":
            is_quote = found in "\"'"
            reason = f"unexpected {quoted(found)}{correction(found)}"
            raise ParseError("unterminated string" if is_quote else reason, column)
        yield Token(found if kind == "mark" else kind, found, column)
        if kind == _END:
            # behind blanks, finditer would find the end once more
            return


class _Waiting(NamedTuple):
    """An operator that waits for operands, or what was opened. first: the position of its first operand."""

    level: int
    token: Token
    first: int


class _Parser:
    """Parses in one pass and without recursion, so that it copes with any depth of nesting.

    An operator takes its operands when one that binds no tighter follows. Of `arg0 + 1 == pid && !uid`, the operands
    that are complete and the operators that wait are, before and after `&&`:

        [arg0 + 1, pid]     [==]
        [arg0 + 1 == pid]   [&&]
    """

    def __init__(self, builder: TreeBuilder, most_tokens: int) -> None:
        """tokens: how many there were so far, its end included."""
        self.tokens = 0
        self._most_tokens = most_tokens
        self._builder = builder
        self._leaves = {_NAME: builder.name, _NUMBER: builder.number, _STRING: builder.string}
        self._operands: list[Node] = []
        self._waiting: list[_Waiting] = []

    def parse(self, text: str) -> Node:
        """Raises ParseError."""
        wants_operand = True
        for token in _tokens(text):
            wants_operand = self._operand(token) if wants_operand else self._behind_operand(token)
            self.tokens += 1
            if self.tokens > self._most_tokens:
                raise ParseError(TOO_MANY_PARTS, token.column)
        (whole,) = self._operands
        return whole

    def _operand(self, token: Token) -> bool:
        """Take a token where an operand begins. Return whether one is still expected."""
        kind, waiting = token.kind, self._waiting
        if kind in self._leaves:
            self._operands.append(self._leaves[kind](token))
            return False
        if kind in {"(", _CALL}:
            self._push(_OPENED, token)
        elif kind in _PREFIX and not (kind == "!" and waiting and waiting[-1].level > _NOT):
            self._push(_PREFIX[kind], token)
        elif kind == ")" and waiting and waiting[-1].token.kind == _CALL and waiting[-1].first == len(self._operands):
            self._close()
            return False
        else:
            _refuse(token, "a name (arg0, pid, execname, …), a number or a string")
        return True

    def _behind_operand(self, token: Token) -> bool:
        """Take a token behind an operand. Return whether another operand is expected."""
        kind, level = token.kind, _INFIX.get(token.kind)
        if level is not None:
            self._reduce(level + 1 if level in _JOINED else level)
            if level not in _JOINED or not self._waiting or self._waiting[-1].level != level:
                self._push(level, token, has_left=True)
            return True
        if kind == "?":
            self._reduce(_ELSE + 1)
            self._push(_OPENED, token, has_left=True)
            return True
        self._reduce(_ELSE)
        opened = self._waiting[-1].token.kind if self._waiting else ""
        if kind == ":" and opened == "?":
            self._waiting[-1] = self._waiting[-1]._replace(level=_ELSE)
            return True
        if kind == "," and opened == _CALL:
            return True
        if kind == ")" and opened in {"(", _CALL}:
            self._close()
        elif kind != _END or opened:
            _refuse_behind_operand(token, opened)
        return False

    def _push(self, level: int, token: Token, *, has_left: bool = False) -> None:
        self._waiting.append(_Waiting(level, token, len(self._operands) - has_left))

    def _close(self) -> None:
        _, token, first = self._waiting.pop()
        if token.kind == _CALL:
            self._operands[first:] = [self._builder.call(token, self._operands[first:])]

    def _reduce(self, level: int) -> None:
        """Give their operands to the operators of this level or above."""
        while self._waiting and self._waiting[-1].level >= level:
            found, token, first = self._waiting.pop()
            self._operands[first:] = [self._built(found, token, self._operands[first:])]

    def _built(self, level: int, token: Token, parts: list[Node]) -> Node:
        """Return what an operator makes of its operands."""
        builder = self._builder
        if level == _NOT:
            return builder.negation(*parts)
        if level == _AND:
            return builder.conjunction(parts)
        if level == _OR:
            return builder.disjunction(parts)
        if level == _ELSE:
            return builder.conditional(*parts)
        if level == _UNARY:
            return builder.minus(token, *parts) if token.kind == "-" else builder.inverse(token, *parts)
        left, right = parts
        if level > _COMPARISON:
            return builder.calculation(left, token, right)
        return builder.match(left, token, right) if token.kind == "~" else builder.comparison(left, token, right)


def _refuse(token: Token, expected: str) -> NoReturn:
    if token.kind == _END:
        raise ParseError(f"unexpected end; expected {expected}", token.column)
    raise ParseError(f"unexpected {quoted(token.text)}; expected {expected}{correction(token.text)}", token.column)


def _refuse_behind_operand(token: Token, opened: str) -> NoReturn:
    """opened: the kind of the innermost token that was opened, empty if there is none."""
    if token.kind in {_END, ")"} and opened == "?":
        end = "end" if token.kind == _END else quoted(")")
        raise ParseError(f"unexpected {end}; ? needs a : and what to choose else", token.column)
    if token.kind == _END:
        raise ParseError("missing closing parenthesis", token.column)
    if token.kind == ")":
        raise ParseError("unmatched closing parenthesis", token.column)
    _refuse(token, "an operator (==, &&, …)")


class Expressions:
    """The expressions of one request. Each text is parsed once, and its tokens are taken of the budget once.

    Methods raise InvalidArgumentError, which names the field and the column, if a text is not valid, or beyond the
    budget. convert: makes something of an expression, once for each text.
    """

    def __init__(self, find_cgroup: FindCgroup, budget: RequestBudget) -> None:
        self._find_cgroup = find_cgroup
        self._budget = budget
        self._parsed: dict[str, tuple[TreeBuilder, Node]] = {}
        self._converted: dict[tuple[str, object, object], object] = {}

    def condition(self, text: str, field: str, convert: Callable[[Condition], _T]) -> _T:
        return self._once(text, field, TreeBuilder.condition, convert)

    def value(self, text: str, field: str, convert: Callable[[Expression], _T]) -> _T:
        """Take any expression: a number, a string, bytes, or a condition."""
        return self._once(text, field, _any, convert)

    def number(self, text: str, field: str, convert: Callable[[Expression], _T]) -> _T:
        """Take a number, or a condition, whose value is 1 or 0."""
        return self._once(text, field, _number, convert)

    def _once(
        self, text: str, field: str, finish: Callable[[TreeBuilder, Node], _Part], convert: Callable[[_Part], _T]
    ) -> _T:
        key = text, finish, convert
        if key not in self._converted:
            try:
                finished = finish(*self._tree(text, field))
            except ParseError as error:
                raise InvalidArgumentError(field, error.reason, error.column, text) from None
            self._converted[key] = convert(finished)
        return cast("_T", self._converted[key])

    def _tree(self, text: str, field: str) -> tuple[TreeBuilder, Node]:
        if text not in self._parsed:
            check_length(text, field)
            self._budget.take_characters(text, field)
            builder = TreeBuilder(self._find_cgroup)
            parser = _Parser(builder, self._budget.parts_left)
            self._parsed[text] = builder, parser.parse(text)
            self._budget.take_parts(parser.tokens, text, field)
        return self._parsed[text]


def column_of(name: str, text: str) -> int:
    """Return where a name is that occurs in an expression."""
    return next(token.column for token in _tokens(text) if token.kind == _NAME and token.text == name)


def check_length(text: str, field: str) -> None:
    if len(text) > MAX_LENGTH:
        reason = f"expressions are limited to {MAX_LENGTH} characters; this one has {len(text)}"
        raise InvalidArgumentError(field, reason, MAX_LENGTH, text)


def _any(_: TreeBuilder, node: Node) -> Expression:
    return node.expression


def _number(_: TreeBuilder, node: Node) -> Expression:
    if node.kind.is_text:
        raise ParseError(f"{node.name} is {node.kind.value}, and a number is needed", node.column)
    return node.expression


def _alone(find_cgroup: FindCgroup) -> Expressions:
    return Expressions(find_cgroup, RequestBudget())


def parse(text: str, find_cgroup: FindCgroup, field: str = "where") -> Condition:
    """Parse a condition by itself. Raises as Expressions does."""
    return _alone(find_cgroup).condition(text, field, lambda condition: condition)


def parse_value(text: str, find_cgroup: FindCgroup, field: str = "value") -> Expression:
    return _alone(find_cgroup).value(text, field, lambda value: value)


def parse_number(text: str, find_cgroup: FindCgroup, field: str = "value") -> Expression:
    return _alone(find_cgroup).number(text, field, lambda value: value)
