"""How users name kernel functions, and values of them.

vfs_read                                     a function of the kernel or of any module
vfs_*                                        those that a glob matches
nf_conntrack:nf_ct_*                         those of one module; the kernel itself is vmlinux
vfs_read(file->f_path.dentry, buf, return)   values: arguments, members of them, and the result
ip_rcv(skb->cb[3], skb->dev->name)           elements of arrays, and of what pointers point to
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from stapsdtd.catalog.selectors import MAX_SELECTOR_LENGTH, Pattern
from stapsdtd.errors import InvalidArgumentError

RESULT = "return"
VMLINUX = "vmlinux"
MAX_VALUES = 12
FIELD = "functions"

_HEAD = re.compile(r"\s*(?:(?P<module>[\w*?\[\]!-]+):)?(?P<name>[\w*?\[\]!.-]+)\s*")
_TOKEN = re.compile(
    r"\s*+(?:(?P<word>[A-Za-z_]\w*)|(?P<number>0[xX][0-9a-fA-F]+|\d+)|(?P<mark>->|[][.,()])|(?P<end>\Z)|(?P<other>.))"
)


@dataclass(frozen=True, slots=True)
class MemberStep:
    """is_arrow: `->`, through a pointer; otherwise `.`. column: of the operator, from 0."""

    name: str
    is_arrow: bool
    column: int


@dataclass(frozen=True, slots=True)
class IndexStep:
    index: int
    column: int


@dataclass(frozen=True, slots=True)
class ValuePath:
    """root: an argument's name or `return`. column: where it begins in the selector, from 0."""

    text: str
    root: str
    steps: tuple[MemberStep | IndexStep, ...]
    column: int


@dataclass(frozen=True, slots=True)
class FunctionSelector:
    """module: None for the kernel and all modules."""

    text: str
    module: Pattern | None
    name: Pattern
    values: tuple[ValuePath, ...] = ()

    def matches_module(self, module: str) -> bool:
        return self.module is None or self.module.matches(module)


def parse(text: str) -> FunctionSelector:
    """Raises InvalidArgumentError, with the column."""
    check_length(text)
    head = _HEAD.match(text)
    if head is None:
        _refuse(text, 0, "a function is expected: NAME, MODULE:NAME or NAME(VALUE, ...)")
    module, name = head["module"], Pattern(head["name"])
    selector = FunctionSelector(text, Pattern(module) if module else None, name)
    if head.end() == len(text):
        return selector
    if name.is_glob and text[head.end()] == "(":
        _refuse(text, head.start("name"), "values are those of one function, which a glob does not name")
    return FunctionSelector(text, selector.module, name, _Parser(text, head.end()).values())


def check_length(text: str) -> None:
    """Raises InvalidArgumentError."""
    if len(text) > MAX_SELECTOR_LENGTH:
        raise InvalidArgumentError(FIELD, f"longer than {MAX_SELECTOR_LENGTH} characters", MAX_SELECTOR_LENGTH, text)


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


def _tokens(text: str, position: int) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text, position):
        kind = match.lastgroup or ""
        yield _Token(kind, match[kind], match.start(kind))


class _Parser:
    """`(` value {`,` value} `)`, where a value is a name and any number of `->name`, `.name` and `[number]`."""

    def __init__(self, text: str, position: int) -> None:
        self._text = text
        self._tokens = _tokens(text, position)
        self._next = next(self._tokens)

    def values(self) -> tuple[ValuePath, ...]:
        self._expect("(", "( or the end is expected after a function's name")
        values = [self._value()]
        while self._next.text == ",":
            self._take()
            if len(values) == MAX_VALUES:
                _refuse(self._text, self._next.column, f"more than {MAX_VALUES} values")
            values.append(self._value())
        self._expect(")", "-> . [ , or ) is expected after a value")
        if self._next.kind != "end":
            _refuse(self._text, self._next.column, "nothing is expected after )")
        return tuple(values)

    def _value(self) -> ValuePath:
        root = self._take_kind("word", f"the name of an argument or {RESULT!r} is expected")
        steps: list[MemberStep | IndexStep] = []
        end = root.column + len(root.text)
        while self._next.text in {"->", ".", "["}:
            operator = self._take()
            if operator.text == "[":
                number = self._take_kind("number", "a number is expected after [")
                end = self._expect("]", "] is expected after a number").column + 1
                steps.append(IndexStep(int(number.text, 0 if number.text[:2] in {"0x", "0X"} else 10), operator.column))
            else:
                name = self._take_kind("word", f"the name of a member is expected after {operator.text}")
                end = name.column + len(name.text)
                steps.append(MemberStep(name.text, operator.text == "->", operator.column))
        return ValuePath(self._text[root.column : end], root.text, tuple(steps), root.column)

    def _take(self) -> _Token:
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token

    def _take_kind(self, kind: str, expected: str) -> _Token:
        if self._next.kind != kind:
            _refuse(self._text, self._next.column, expected)
        return self._take()

    def _expect(self, mark: str, expected: str) -> _Token:
        if self._next.text != mark:
            _refuse(self._text, self._next.column, expected)
        return self._take()


def _refuse(text: str, column: int, reason: str) -> NoReturn:
    raise InvalidArgumentError(FIELD, reason, column, text)
