"""How large modules and classes of the package may be, so that each has one role and can be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support import ROOT

_MODULE_LINES = 600
_CLASS_LINES = 250
_GENERATED = "v1"


def too_large(source: str) -> Iterator[tuple[str, int]]:
    """Yield what is too large in a module, and how many lines it has; a class counts from `class` to its last line."""
    lines = len(source.splitlines())
    if lines > _MODULE_LINES:
        yield "module", lines
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > _CLASS_LINES:
                yield node.name, lines


def test_modules_and_classes_can_be_read_at_once() -> None:
    modules = [path for path in (ROOT / "stapsdtd").rglob("*.py") if path.parent.name != _GENERATED]
    assert ROOT / "stapsdtd/daemon.py" in modules
    found = {str(path.relative_to(ROOT)): list(too_large(path.read_text())) for path in modules}
    assert {path: large for path, large in found.items() if large} == {}


def test_one_line_more_is_too_large() -> None:
    body = "    x = 1\n" * (_CLASS_LINES - 1)
    assert list(too_large("class A:\n" + body)) == []
    assert list(too_large("class A:\n" + body + "    x = 1\n")) == [("A", _CLASS_LINES + 1)]
    assert list(too_large("x = 1\n" * _MODULE_LINES)) == []
    assert list(too_large("x = 1\n" * (_MODULE_LINES + 1))) == [("module", _MODULE_LINES + 1)]
