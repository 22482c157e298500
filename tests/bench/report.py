"""Figures for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in `unit`; ratio is to the reference of the same run, None where there is none.

    goal says in words what is aimed at, and met whether it was reached: None where there is no goal, or nothing that it
    could be held against. note is what a reader should know of how it came about.
    """

    name: str
    median: float
    unit: str
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    note: str = ""


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median of ratios between neighbours in time; None where nothing was measured beside ours."""
    return median(mine / other for mine, other in zip(ours, theirs, strict=True)) if theirs else None


def table(figures: Sequence[Figure]) -> str:
    heads = ("", "median", "ratio", "goal", "met", "")
    rows = [heads, *map(_cells, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(map(str.rstrip, (_line(row, widths) for row in rows)))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers to the right, words to the left."""
    cells = zip(row, widths, "<>><<<", strict=True)
    return "  ".join(f"{cell:{side}{width}}" for cell, width, side in cells)


def _cells(figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
    met = "" if figure.met is None else "yes" if figure.met else "NO"
    return figure.name, _shown(figure.median, figure.unit), ratio, figure.goal, met, figure.note


def _shown(value: float, unit: str) -> str:
    if unit == "/s" and value >= 1e6:
        return f"{value / 1e6:.3g} M/s"
    if unit != "s":
        return f"{value:.4g} {unit}".rstrip()
    for scale, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * scale >= 1:
            return f"{value * scale:.3g} {name}"
    return f"{value * 1e9:.3g} ns"
