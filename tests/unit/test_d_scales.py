"""The bins of quantize(), lquantize() and llquantize()."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stapsdtd.query.d.scales import Scale, llquantize, lquantize, quantize

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2000, 2000)
LLQUANTIZE = st.sampled_from(
    [(10, 0, 2, 20), (10, 0, 1, 10), (4, 0, 1, 2), (4, 0, 1, 8), (2, 0, 40, 1), (10, 2, 5, 5), (10, 3, 18, 1000)]
)


def labels(scale: Scale) -> str:
    return "|".join(scale.label(number, 0) for number in range(len(scale.labels)))


@given(INT64)
def test_quantize_takes_powers_of_two_and_their_negatives(value: int) -> None:
    least = int(quantize().labels[quantize().bin(value)])
    if abs(value) >= 1 << 62:
        assert abs(least) == 1 << 62
    else:
        assert abs(least) <= abs(value) < max(2 * abs(least), 1)
    assert least * value >= 0


@given(st.integers(-1000, 1000), st.integers(1, 1000), st.integers(1, 1000), INT64)
def test_lquantize_takes_steps_and_what_is_beyond(base: int, width: int, step: int, value: int) -> None:
    assume(step <= width)
    scale = lquantize(base, base + width, step)
    label = scale.labels[scale.bin(value)]
    limit = base + width // step * step
    if value < base:
        assert label == f"< {base}"
    elif value >= limit:
        assert label == f">= {limit}"
    else:
        assert int(label) <= value < int(label) + step
        assert (int(label) - base) % step == 0


@given(LLQUANTIZE, INT64)
def test_llquantize_takes_steps_of_each_power(parameters: tuple[int, int, int, int], value: int) -> None:
    factor, low, high, steps = parameters
    scale = llquantize(*parameters)
    weight = scale.weights[scale.bin(value)]
    magnitude = abs(value)
    if magnitude < factor**low:
        assert weight == 0
    elif magnitude >= factor ** (high + 1):
        assert abs(weight) == factor ** (high + 1)
    else:
        power = next(power for power in range(low, high + 1) if magnitude < factor ** (power + 1))
        end = factor ** (power + 1)
        assert abs(weight) <= magnitude < abs(weight) + max(end // steps, 1)
    assert weight * value >= 0


@given(LLQUANTIZE, INT64)
def test_llquantize_is_the_same_below_zero(parameters: tuple[int, int, int, int], value: int) -> None:
    scale = llquantize(*parameters)
    assert scale.weights[scale.bin(value)] == -scale.weights[scale.bin(-value)]


def test_labels() -> None:
    assert labels(lquantize(10, 22, 5)) == "< 10|10|15|>= 20"
    assert labels(llquantize(4, 0, 1, 4)) == "<= -16|-12|-8|-4|-3|-2|-1|0|1|2|3|4|8|12|>= 16"
    # fewer steps than the factor, and more
    assert labels(llquantize(4, 0, 1, 2)) == "<= -16|-8|-4|-2|-1|0|1|2|4|8|>= 16"
    assert labels(llquantize(4, 0, 1, 8)) == "<= -16|-14|-12|-10|-8|-6|-4|-3|-2|-1|0|1|2|3|4|6|8|10|12|14|>= 16"


def test_the_bin_around_zero_is_called_after_what_is_shown() -> None:
    scale = llquantize(10, 2, 3, 2)
    zero = scale.bin(0)
    assert scale.label(zero, zero - 1) == "abs() < 100"
    assert scale.label(zero, zero) == "< 100"
    assert scale.label(zero + 1, zero) == "100"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((0, 1 << 31, 1), "must be integers of 32 bits"),
        ((5, 5, 1), "the base, 5, must be less than the limit, 5"),
        ((0, 10, 0), "the step must be from 1 to 65535"),
        ((0, 10, 11), "the step, 11, is too large"),
        ((0, 65536, 1), "the step, 1, is too small"),
    ],
)
def test_lquantize_refuses_what_makes_no_bins(parameters: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lquantize(*parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((1, 0, 1, 1), "the factor must be from 2 to 65535"),
        ((10, 3, 2, 10), "the magnitudes must rise"),
        ((10, 0, 19, 10), "end within 64 bits"),
        ((10, 0, 2, 0), "the steps must divide the factor, 10, or be a multiple"),
        ((10, 0, 2, 3), "the steps must divide the factor, 10, or be a multiple"),
        ((10, 0, 2, 30), "30 steps must divide 10.*2 into integers"),
        ((10, 9, 18, 10000), "more than 65535 bins"),
    ],
)
def test_llquantize_refuses_what_makes_no_bins(parameters: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llquantize(*parameters)
