"""Into which bins quantize(), lquantize() and llquantize() put values, and how those are labelled.

quantize       … -2 | -1 | 0 | 1 | 2 to 3 | 4 to 7 | …
lquantize      < 10 | 10 to 14 | 15 to 19 | >= 20
llquantize     <= -100 | … | abs() < 10 | 10 to 19 | 20 to 29 | … | >= 100
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

_GREATEST_BINS = (1 << 16) - 1
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Scale:
    """Bins in rising order, one more than there are edges.

    edges: the least value of each bin but the first. labels, weights: of each bin; the weight is the value that sorting
    takes for those in it. middle: the bin that is shown with its neighbours where all are empty. alternative: another
    label of the bin around 0, for where no bin below it is shown.
    """

    edges: tuple[int, ...]
    labels: tuple[str, ...]
    weights: tuple[int, ...]
    middle: int
    alternative: str | None = None

    @property
    def zero(self) -> int | None:
        """The bin of weight 0, if there is one."""
        return self.weights.index(0) if 0 in self.weights else None

    def bin(self, value: int) -> int:
        """Return the number of the value's bin."""
        return bisect_right(self.edges, value)

    def label(self, number: int, first: int) -> str:
        """Return a bin's label. first: the first bin that is shown."""
        if number == self.zero and self.alternative is not None and first == number:
            return self.alternative
        return self.labels[number]


def _symmetric(points: tuple[int, ...]) -> Scale:
    """points: the least value of each bin above 0. A bin below 0 has the same values with the other sign."""
    weights = (*(-point for point in reversed(points)), 0, *points)
    edges = (*(1 - point for point in reversed(points)), *points)
    return Scale(edges, tuple(map(str, weights)), weights, len(points))


def quantize() -> Scale:
    """Return bins of powers of two, from -(1 << 62) to 1 << 62; what is beyond is in the outermost."""
    return _symmetric(tuple(1 << bit for bit in range(63)))


def lquantize(base: int, limit: int, step: int = 1) -> Scale:
    """Return bins of `step` values from base, as many as fit below limit. Raises ValueError."""
    if not (_INT32_MIN <= base <= _INT32_MAX and _INT32_MIN <= limit <= _INT32_MAX):
        raise ValueError("lquantize(): the base and the limit must be integers of 32 bits")
    if limit <= base:
        raise ValueError(f"lquantize(): the base, {base}, must be less than the limit, {limit}")
    if not 0 < step <= _GREATEST_BINS:
        raise ValueError(f"lquantize(): the step must be from 1 to {_GREATEST_BINS}")
    levels = (limit - base) // step
    if not levels:
        raise ValueError(f"lquantize(): the step, {step}, is too large: there is not one bin from {base} to {limit}")
    if levels > _GREATEST_BINS:
        raise ValueError(f"lquantize(): the step, {step}, is too small: it makes {levels} bins of {_GREATEST_BINS}")
    edges = tuple(base + level * step for level in range(levels + 1))
    labels = (f"< {base}", *map(str, edges[:-1]), f">= {edges[-1]}")
    return Scale(edges, labels, (base - 1, *edges[:-1], edges[-1] + 1), middle=1)


def llquantize(factor: int, low: int, high: int, steps: int) -> Scale:
    """Return `steps` bins for each power of factor, from factor ** low to factor ** (high + 1), less those that the
    power before it has; as many as there are integers for. The same below 0. Raises ValueError.
    """
    if not 2 <= factor <= _GREATEST_BINS:
        raise ValueError(f"llquantize(): the factor must be from 2 to {_GREATEST_BINS}")
    if not 0 <= low <= high <= 63 or factor ** (high + 1) >= 1 << 64:
        raise ValueError("llquantize(): the magnitudes must rise from 0 or more, and the last bin end within 64 bits")
    if not 0 < steps <= _GREATEST_BINS or (factor % steps if steps < factor else steps % factor):
        raise ValueError(f"llquantize(): the steps must divide the factor, {factor}, or be a multiple of it")
    least = max(low, 1)
    if steps > factor and factor ** (least + 1) % steps:
        raise ValueError(f"llquantize(): {steps} steps must divide {factor}**{least + 1} into integers")
    if (high - low + 1) * steps > _GREATEST_BINS:
        raise ValueError(f"llquantize(): that makes more than {_GREATEST_BINS} bins")
    points = {factor**low}
    for magnitude in range(low, high + 1):
        end = factor ** (magnitude + 1)
        if magnitude == 0 and steps > factor:
            points.update(range(1, factor + 1))
        else:
            points.update(step * end // steps for step in range(steps // factor + 1, steps + 1))
    scale = _symmetric(tuple(sorted(points)))
    labels = [f"<= {scale.labels[0]}", *scale.labels[1:-1], f">= {scale.labels[-1]}"]
    zero, least = scale.middle, factor**low
    if least == 1:
        return replace(scale, labels=tuple(labels), middle=zero + 1)
    labels[zero] = f"abs() < {least}"
    return replace(scale, labels=tuple(labels), middle=zero + 1, alternative=f"< {least}")
