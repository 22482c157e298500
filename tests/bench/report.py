"""Figures for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in `unit`; ratio is to the reference of the same run, None where there is none."""

    name: str
    median: float
    unit: str
    ratio: float | None


def table(figures: list[Figure]) -> str:
    width = max(len(figure.name) for figure in figures)
    return "\n".join(
        f"{figure.name:{width}}  {_shown(figure.median, figure.unit):>10}  "
        + ("" if figure.ratio is None else f"{figure.ratio:.3g} of the reference")
        for figure in figures
    )


def _shown(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.4g} {unit}".rstrip()
    for scale, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * scale >= 1:
            return f"{value * scale:.3g} {name}"
    return f"{value * 1e9:.3g} ns"
