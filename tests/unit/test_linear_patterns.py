r"""Regular expressions of the package do not backtrack over long texts, which clients and traced programs choose.

    (a+)+      refused: an unbounded repetition within another
    \s*x?\s*   refused: two that may divide blanks among them, so that a text that fails is tried in all ways
    \s*+x?\s*  fine: the first one gives nothing back

Globs go through `stapsdtd.globs`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from typing import cast

import pytest

import stapsdtd
from tests.support import ROOT

_parser = importlib.import_module("re._parser")
_CHARACTERS = frozenset(range(256))
_MANY = 64
"""A repetition that is bounded by more than this counts as unbounded."""
Set = frozenset[int]
Node = tuple[object, object]
"""An operation and its value, as `re` parses them."""


def _nodes(value: object) -> list[Node]:
    return list(cast("Iterable[Node]", value))


def _branches(value: object) -> list[list[Node]]:
    return [_nodes(branch) for branch in cast("Iterable[object]", value)]


def _members(node: Node) -> Set:
    operation, value = str(node[0]), node[1]
    match operation, value:
        case "LITERAL", int(code):
            return frozenset({min(code, 255)})
        case "NOT_LITERAL", int(code):
            return _CHARACTERS - {code}
        case "RANGE", (int(first), int(last)):
            return frozenset(range(first, min(last, 255) + 1))
        case "CATEGORY", category:
            letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[str(category).rpartition("_")[2]]
            text = re.compile(rf"\{letter.upper() if '_NOT_' in str(category) else letter}", re.ASCII)
            return frozenset(code for code in _CHARACTERS if text.match(chr(code)))
        case "IN", parts:
            nodes = _nodes(parts)
            negated = str(nodes[0][0]) == "NEGATE"
            inside = frozenset[int]().union(*(_members(node) for node in nodes[negated:]))
            return _CHARACTERS - inside if negated else inside
    raise AssertionError(node)


class _Checker:
    """given: the characters of the unbounded repetitions that could have left to others what comes next."""

    def __init__(self, flags: int) -> None:
        self._any = _CHARACTERS if flags & re.DOTALL else _CHARACTERS - {ord("\n")}
        self.faults: list[str] = []

    def check(self, nodes: Iterable[Node], given: frozenset[Set]) -> frozenset[Set]:
        for node in nodes:
            given = self._after(node, given)
        return given

    def _after(self, node: tuple[object, object], given: frozenset[Set]) -> frozenset[Set]:
        operation, value = str(node[0]), node[1]
        match operation, value:
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT", (int(least), int(most), inner):
                return self._repeated(operation, least, most, _nodes(inner), given)
            case "SUBPATTERN", (*_, inner):
                return self.check(_nodes(inner), given)
            case "ATOMIC_GROUP", inner:
                return self.check(_nodes(inner), given) & given
            case "BRANCH", (_, branches):
                return frozenset[Set]().union(*(self.check(branch, given) for branch in _branches(branches)))
            case "ASSERT" | "ASSERT_NOT", (_, inner):
                self.check(_nodes(inner), frozenset())
                return given
            case "AT" | "GROUPREF" | "GROUPREF_EXISTS", _:
                return given
        members = self._members(node)
        return frozenset(each for each in given if each & members)

    def _repeated(
        self, operation: str, least: int, most: int, inner: list[Node], given: frozenset[Set]
    ) -> frozenset[Set]:
        gives_back = operation != "POSSESSIVE_REPEAT"
        if most <= _MANY:
            once = self.check(inner, given)
            after = once if gives_back else once & given
            return after if least else after | given
        members = frozenset[int]().union(*self._sets(inner))
        overlapping = frozenset(each for each in given if each & members)
        if overlapping:
            self.faults.append("two adjacent repetitions")
        rest = overlapping if least else given
        within = self.check(inner, frozenset())
        if not gives_back:
            return rest
        # once more, as it comes behind itself
        self.check(inner, within)
        return rest | {members}

    def _members(self, node: Node) -> Set:
        return self._any if str(node[0]) == "ANY" else _members(node)

    def _sets(self, nodes: Iterable[Node]) -> Iterator[Set]:
        for operation, value in nodes:
            match str(operation), value:
                case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT" | "SUBPATTERN", (*_, inner):
                    yield from self._sets(_nodes(inner))
                case "ATOMIC_GROUP", inner:
                    yield from self._sets(_nodes(inner))
                case "BRANCH", (_, branches):
                    for branch in _branches(branches):
                        yield from self._sets(branch)
                case "ASSERT" | "ASSERT_NOT" | "AT" | "GROUPREF" | "GROUPREF_EXISTS", _:
                    pass
                case _:
                    yield self._members((operation, value))


def faults(pattern: str | bytes, flags: int = 0) -> list[str]:
    """Return what makes an expression backtrack, if anything does."""
    parsed = _parser.parse(pattern, flags & ~re.UNICODE if isinstance(pattern, bytes) else flags)
    checker = _Checker(flags | parsed.state.flags)
    checker.check(parsed, frozenset())
    return checker.faults


def _compiled() -> Iterator[tuple[str, str | bytes, int]]:
    """Yield the qualified name, the pattern and the flags of each expression that a module of the package keeps."""
    for found in pkgutil.walk_packages(stapsdtd.__path__, "stapsdtd."):
        if found.name.startswith("stapsdtd.v1") or found.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(found.name)).items():
            for each in value.values() if isinstance(value, dict) else [value]:
                if isinstance(each, re.Pattern):
                    yield f"{found.name}.{name}", each.pattern, each.flags


def _called() -> Iterator[tuple[str, str | bytes | None]]:
    """Yield the module of each call of a function of `re`, and its pattern, None where it is no constant."""
    for path in (ROOT / "stapsdtd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), name), [pattern, *_]) if name != "escape":
                    constant = pattern.value if isinstance(pattern, ast.Constant) else None
                    assert constant is None or isinstance(constant, str | bytes)
                    # constants that are compiled are kept, with their flags
                    if constant is None or name != "compile":
                        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), constant


_TRUSTED = {
    "stapsdtd.capture.ftrace.format._FIELD": "the kernel's description of an event",
    "stapsdtd.functions.probes._OF_PROGRAMS": "names of the kernel's functions",
    "stapsdtd.query.d.parse._DECLARATION": "the user's own program, in the user's command",
    "stapsdtd.query.d.parse._SPACE": "nothing is behind it, so that it is never matched again",
    "stapsdtd.query.d.statements._TOKEN": "the user's own program, in the user's command",
    "stapsdtd.signatures.dtrace_file._DEFINE": "the user's own file, in the user's command",
    "stapsdtd.signatures.dtrace_file._TYPEDEF": "the user's own file, in the user's command",
}
"""What backtracks on texts that neither clients nor programs choose, or not at all."""

_BUILT = {
    "stapsdtd.globs": "what fnmatch.translate makes, of short patterns and texts",
    "stapsdtd.sandbox.codec": "patterns of model.py, constants",
    "stapsdtd.cli.sql_text": "kept in a dictionary, and checked there",
    "stapsdtd.cli.kernel_selectors": "kept, and checked there",
    "stapsdtd.kernel.containers": "kept, and checked there",
    "stapsdtd.query.d.parse": "an alternation of what is kept there",
}
"""Modules that call `re` with a pattern that is not written there as a constant."""


def test_no_kept_expression_backtracks() -> None:
    found = {(name, pattern): faults(pattern, flags) for name, pattern, flags in _compiled()}
    assert len(found) > 100
    assert {name for (name, _), each in found.items() if each} == set(_TRUSTED)


def test_no_called_expression_backtracks() -> None:
    called = list(_called())
    assert {module for module, pattern in called if pattern is None} == set(_BUILT)
    found = {(module, pattern): faults(pattern) for module, pattern in called if pattern is not None}
    assert {key: each for key, each in found.items() if each} == {}


def test_globs_go_through_one_module() -> None:
    """procs/opening.py, which runs without the package, in a process of its user's that may be ended, has its own."""
    users = {
        str(path.relative_to(ROOT / "stapsdtd"))
        for path in (ROOT / "stapsdtd").rglob("*.py")
        if re.search(r"^(?:import|from) fnmatch", path.read_text(), re.MULTILINE)
    }
    assert users == {"globs.py", "procs/opening.py"}


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+",
        r"(?:a|b*)*c",
        r"\s*x?\s*",
        r"\w+\d*",
        r"a*b?a+",
        r".*x.*",
        r"(\w+\s*)+;",
        r"a*(?:b|c*)a*",
        r"a{0,99}a*",
    ],
)
def test_what_backtracks_is_found(pattern: str) -> None:
    assert faults(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"\s*+x?\s*", r"(?:\w+\s+)+;", r"a*ba*", r"[^,]*,[^,]*", r"(?:a++)*b", r"\d{1,9}\d*", r".*\n.*", r"(?>a*)b?a*"],
)
def test_what_does_not_is_not(pattern: str) -> None:
    assert not faults(pattern)
