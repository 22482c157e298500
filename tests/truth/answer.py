"""Whether an answer was right, and by how much it was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

_Key = TypeVar("_Key")


@dataclass(slots=True)
class Answer:
    """The answer of one run. problems: why it is wrong. difference: the greatest, in unit; it may be within bounds."""

    unit: str = "hits"
    problems: list[str] = field(default_factory=list)
    difference: float = 0

    @property
    def is_right(self) -> bool:
        return not self.problems

    def require(self, what: str, found: object, expected: object) -> None:
        """Note what is not equal to what it has to be."""
        if found != expected:
            self.problems.append(f"{what}: {found} instead of {expected}")
            if isinstance(found, int | float) and isinstance(expected, int | float):
                self.difference = max(self.difference, abs(found - expected))

    def bracket(self, what: str, low: float, found: float, high: float) -> None:
        """Note what is not within its bounds."""
        beyond = max(low - found, found - high, 0)
        self.difference = max(self.difference, beyond)
        if beyond:
            self.problems.append(f"{what}: {found} is not within {low} and {high}")

    def compare(self, what: str, found: Mapping[_Key, object], expected: Mapping[_Key, object]) -> None:
        """Note each key with another value than it has to have."""
        for key in [*expected, *(each for each in found if each not in expected)]:
            self.require(f"{what} {str(key)[-30:]}", found.get(key, 0), expected.get(key, 0))


@dataclass(frozen=True, slots=True)
class Row:
    """What became of all runs of a question under a load."""

    question: str
    load: str
    answers: Sequence[Answer]

    @property
    def wrong(self) -> list[Answer]:
        return [each for each in self.answers if not each.is_right]

    @property
    def cells(self) -> tuple[str, ...]:
        right = len(self.answers) - len(self.wrong)
        worst = max(self.answers, key=lambda each: each.difference)
        return self.question, self.load, str(len(self.answers)), str(right), _quantity(worst.difference, worst.unit)


HEADING = ("question", "load", "runs", "right", "worst difference")


def line(cells: Sequence[str]) -> str:
    """Return a line of the table."""
    question, load, runs, right, worst = cells
    return f"{question:<34}{load:<8}{runs:>5}{right:>7}  {worst}"


def _quantity(value: float, unit: str) -> str:
    return f"{value:,.6g} {unit}" if value else "0"
