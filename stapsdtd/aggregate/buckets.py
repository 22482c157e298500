"""The buckets of a histogram: integers, in rising order of the values that they hold.

LogLinear(0)                      …, -1, 0, 1, 2 to 3, 4 to 7, …                     DTrace's quantize
LogLinear(5)                      32 buckets for each power of two, 3.1 % wide       percentiles
Edges((0, 10, 20))                below 0, 0 to 9, 10 to 19, 20 and above            lquantize, llquantize
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MAX_BUCKETS = 2048
"""Between the first edge and the last."""
LEAST, GREATEST = -(1 << 63), (1 << 64) - 1
"""The values that integers of 64 bits have, signed or not."""

_MAX_EXPONENT = 62
_POWERS = np.array([1 << bit for bit in range(64)], np.uint64)

Integers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]
BucketNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogLinear:
    """1 << sub_bits buckets of equal width for each power of two; one for each value below that. Negative values have
    negative buckets.
    """

    sub_bits: int

    def numbers(self, values: Integers) -> BucketNumbers:
        """Return the bucket of each value."""
        is_negative = values < 0
        magnitudes = np.where(is_negative, np.negative(values), values).astype(np.uint64)
        # the position of the highest bit
        exponents = np.maximum(np.searchsorted(_POWERS, magnitudes, side="right") - 1, self.sub_bits).astype(np.uint64)
        shifts = exponents - np.uint64(self.sub_bits)
        linear = (magnitudes >> shifts).astype(np.int64) + (shifts.astype(np.int64) << self.sub_bits)
        return np.where(is_negative, -linear, linear)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the least and the greatest value of a bucket."""
        magnitude = abs(number)
        shift = max((magnitude >> self.sub_bits) - 1, 0)
        low = (magnitude - (shift << self.sub_bits)) << shift
        high = low + (1 << shift) - 1
        return (max(-high, LEAST), -low) if number < 0 else (low, high)


@dataclass(frozen=True, slots=True)
class Edges:
    """A bucket from each edge to the next, one below the first, and one from the last on.

    edges: of signed 64-bit integers, in rising order, of at most MAX_BUCKETS buckets between them.
    """

    edges: tuple[int, ...]
    _array: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_array", np.array(self.edges, np.int64))

    def numbers(self, values: Integers) -> BucketNumbers:
        if values.dtype == np.uint64:
            # beyond every edge, as it is
            values = np.minimum(values, np.uint64((1 << 63) - 1)).astype(np.int64)
        return np.searchsorted(self._array, values, side="right").astype(np.int64)

    def bounds(self, number: int) -> tuple[int, int]:
        low = self.edges[number - 1] if number else LEAST
        high = self.edges[number] - 1 if number < len(self.edges) else GREATEST
        return low, high


Buckets = LogLinear | Edges

POWERS_OF_TWO = LogLinear(0)
FINE = LogLinear(5)


def linear(low: int, high: int, step: int) -> Edges:
    """Return buckets of step values each from low to high. Raises ValueError."""
    if step < 1:
        raise ValueError("the step must be at least 1")
    if not -(1 << 63) <= low < high < 1 << 63:
        raise ValueError("low must be less than high, and both numbers of 64 bits")
    count = -((low - high) // step)
    if count > MAX_BUCKETS:
        raise ValueError(f"that makes {count} buckets; the limit is {MAX_BUCKETS}")
    return Edges((*range(low, high, step), high))


def log_linear(factor: int, low: int, high: int, steps: int) -> Edges:
    """Return `steps` buckets for each power of factor, from factor ** low to factor ** (high + 1), where integers allow
    so many, the same below 0, and one in between. Raises ValueError.
    """
    if factor < 2:
        raise ValueError("the factor must be at least 2")
    if not 0 <= low <= high <= _MAX_EXPONENT or factor ** (high + 1) >= 1 << 63:
        raise ValueError("the exponents must rise from 0 or more, and the last bucket end within 63 bits")
    if steps < factor or steps % factor or steps > MAX_BUCKETS:
        raise ValueError(f"the number of steps must be a multiple of the factor, {factor}, and at most {MAX_BUCKETS}")
    edges: set[int] = set()
    for exponent in range(low, high + 1):
        end = factor ** (exponent + 1)
        edges.update(range(factor**exponent, end, max(end // steps, 1)))
        if 2 * len(edges) > MAX_BUCKETS:
            raise ValueError(f"that makes more than {MAX_BUCKETS} buckets")
    above = (*sorted(edges), factor ** (high + 1))
    # a bucket of negative values has the same values with the other sign
    return Edges((*(1 - edge for edge in reversed(above)), *above))
