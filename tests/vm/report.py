"""What a guest's tests came to, from pytest's JUnit file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, parse


@dataclass(frozen=True, slots=True)
class Report:
    """failed and skipped: the tests' names, with what pytest said of each. A test may have failed twice, the second
    time while it was torn down.
    """

    passed: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        counts = [(self.passed, "passed"), (self.failed, "failed"), (self.skipped, "skipped")]
        return ", ".join(f"{len(tests)} {what}" for tests, what in counts if tests) or "no test ran"


def read(path: Path) -> Report:
    """Raises FileNotFoundError, and ParseError where pytest was ended while it wrote."""
    passed, failed, skipped = [], [], []
    for case in parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if wrong := list(_said(case, "failure", "error")):
            failed += [(name, text) for text in wrong]
        elif left := list(_said(case, "skipped")):
            skipped.append((name, left[0]))
        else:
            passed.append(name)
    return Report(tuple(passed), tuple(failed), tuple(skipped))


def _said(case: Element, *kinds: str) -> Iterator[str]:
    for child in case:
        if child.tag in kinds:
            yield (child.text or child.get("message") or "").strip()
