"""The picture of a distribution, in DTrace's layout.

           value  ------------- Distribution ------------- count
               1 |                                         0
               2 |@@@@@@@@@@                               1
               4 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@           3
               8 |                                         0

Counts are on the left of 9 columns, so that lines end with blanks. Bars are parts of 40 columns. Where programs count
by negative numbers, those bars grow to the left of the line, and share the columns with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stapsdtd.query.d.scales import Scale
from stapsdtd.query.d.values import quotient

_COLUMNS = 40
_TITLE = f"{'value':>16} {'------------- Distribution -------------':>41} {'count':<9}"


def picture(scale: Scale, bins: Mapping[int, int], normal: int = 1) -> str:
    """Return a line end and the lines, each with its own. normal: what the counts that are told are divided by."""
    return "\n" + "".join(f"{line}\n" for line in _lines(scale, bins, normal))


def _lines(scale: Scale, bins: Mapping[int, int], normal: int) -> Iterator[str]:
    yield _TITLE
    filled = [number for number, count in bins.items() if count]
    first, last = (min(filled), max(filled)) if filled else (scale.middle, scale.middle)
    # and an empty one at each end
    first, last = max(first - 1, 0), min(last + 1, len(scale.labels) - 1)
    counts = [bins.get(number, 0) for number in range(first, last + 1)]
    for number, count in enumerate(counts, first):
        yield f"{scale.label(number, first):>16} {_bar(count, counts)} {quotient(count, normal):<9}"


def _bar(count: int, counts: list[int]) -> str:
    has_negatives = min(counts) < 0
    columns = _COLUMNS // 2 if has_negatives and max(counts) > 0 else _COLUMNS
    total = sum(map(abs, counts))
    # rounded, exactly
    length = (2 * abs(count) * columns + total) // (2 * total) if total else 0
    ats = "@" * length
    if not has_negatives:
        return f"|{ats:<{columns}}"
    if columns == _COLUMNS:
        return f"{ats:>{columns}}|"
    return f"{ats:>{columns}}|{'':{columns}}" if count <= 0 else f"{'':{columns}}|{ats:<{columns}}"
