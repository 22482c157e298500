"""Aggregations in memory: results in integers of 64 bits, clear, trunc and normalize, rows from elsewhere."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.query.d.aggregations import Aggregation, Function, Row, key_rank
from stapsdtd.query.d.scales import Scale, llquantize, lquantize, quantize
from stapsdtd.query.d.values import INT64, Integer, String, quotient, signed

SMALL = st.integers(-(2**40), 2**40)
KEYED = st.lists(st.tuples(st.integers(0, 5), SMALL))
NUMBERS = [Function.COUNT, Function.SUM, Function.AVG, Function.MIN, Function.MAX, Function.STDDEV]
SCALES = [quantize(), lquantize(-100, 100, 7), llquantize(10, 0, 6, 20), llquantize(10, 2, 6, 5)]


def aggregated(function: Function, values: list[tuple[int, int]], scale: Scale | None = None) -> Aggregation:
    aggregation = Aggregation("a", function, (INT64,), scale)
    for key, value in values:
        aggregation.add((key,), value)
    return aggregation


def results(aggregation: Aggregation) -> dict[object, int]:
    return {key[0]: aggregation.number(row) for key, row in aggregation.rows.items()}


def single(function: Function, *values: int) -> int:
    return results(aggregated(function, [(0, value) for value in values]))[0]


def truncated(value: Fraction) -> int:
    return math.trunc(value)


@given(st.lists(SMALL, min_size=1))
def test_results(values: list[int]) -> None:
    assert single(Function.COUNT, *values) == len(values)
    assert single(Function.SUM, *values) == sum(values)
    assert single(Function.MIN, *values) == min(values)
    assert single(Function.MAX, *values) == max(values)
    assert single(Function.AVG, *values) == truncated(Fraction(sum(values), len(values)))
    mean = truncated(Fraction(sum(values), len(values)))
    squares = sum(value * value for value in values) // len(values)
    assert single(Function.STDDEV, *values) == math.isqrt(squares - mean * mean)


def test_integers_have_64_bits() -> None:
    assert single(Function.SUM, 2**63 - 1, 1) == -(2**63)
    assert single(Function.MAX, 2**64 - 1) == -1
    # as exact as the squares, of 128 bits
    assert single(Function.STDDEV, *(5_000_000_000 + 100 * step for step in range(10))) == 287
    assert single(Function.AVG, -7, 0) == -3


@pytest.mark.parametrize("scale", SCALES)
@given(values=st.lists(st.tuples(SMALL, st.integers(-100, 100))))
def test_a_distribution_counts_each_value_once(scale: Scale, values: list[tuple[int, int]]) -> None:
    aggregation = Aggregation("a", Function.QUANTIZE, (), scale)
    for value, increment in values:
        aggregation.add((), value, increment)
    bins = aggregation.rows[()].bins if values else {}
    assert sum(bins.values()) == sum(increment for _, increment in values)
    for number, count in bins.items():
        assert count == sum(increment for value, increment in values if scale.bin(value) == number)


@pytest.mark.parametrize("function", NUMBERS)
@given(first=KEYED, second=KEYED)
def test_rows_of_elsewhere_add_up(
    function: Function, first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    parts = aggregated(function, first)
    for key, row in aggregated(function, second).rows.items():
        parts.merge(key, row)
    assert results(parts) == results(aggregated(function, first + second))


def test_a_row_that_was_merged_stays_as_it_was() -> None:
    row = Row(1, 5, 25, 5, 5, {3: 1})
    aggregation = Aggregation("a", Function.SUM)
    for _ in range(2):
        aggregation.merge((), row)
    assert aggregation.number(aggregation.rows[()]) == 10
    assert row == Row(1, 5, 25, 5, 5, {3: 1})


def test_buckets_of_elsewhere_are_bins() -> None:
    aggregation = Aggregation("a", Function.QUANTIZE, (), quantize())
    values = [-5, -1, 0, 1, 2, 3, 900, 2**63 - 1]
    for value in values:
        aggregation.add((), value)
    buckets = [(-7, -4, 1), (-1, -1, 1), (0, 0, 1), (1, 1, 1), (2, 3, 2), (512, 1023, 1), (1 << 62, (1 << 63) - 1, 1)]
    assert aggregation.bins_of(buckets) == aggregation.rows[()].bins
    with pytest.raises(ValueError, match="@a: no bin has the values from 3 to 4"):
        aggregation.bins_of([(3, 4, 1)])


def test_open_buckets_are_the_outermost_bins() -> None:
    aggregation = Aggregation("a", Function.LQUANTIZE, (), lquantize(0, 10, 5))
    assert aggregation.bins_of([(None, -1, 2), (0, 4, 1), (10, None, 3)]) == {0: 2, 1: 1, 3: 3}
    with pytest.raises(ValueError, match="no bin has the values from 9 to 9223372036854775807"):
        aggregation.bins_of([(9, None, 1)])


@given(KEYED, st.integers(-8, 8))
def test_trunc_keeps_the_greatest_or_the_least(values: list[tuple[int, int]], count: int) -> None:
    aggregation = aggregated(Function.SUM, values)
    before = results(aggregation)
    aggregation.truncate(count)
    kept = results(aggregation)
    assert kept.items() <= before.items()
    assert len(kept) == min(abs(count), len(before))
    gone = [before[key] for key in before.keys() - kept.keys()]
    if gone and kept:
        assert min(kept.values()) >= max(gone) if count > 0 else max(kept.values()) <= min(gone)


def test_trunc_without_a_number_removes_all() -> None:
    aggregation = aggregated(Function.COUNT, [(1, 0), (2, 0)])
    aggregation.truncate()
    assert not aggregation.rows


def test_trunc_prefers_greater_keys_among_equals() -> None:
    values = [(key, 1) for key in range(4)]
    greatest, least = aggregated(Function.SUM, values), aggregated(Function.SUM, values)
    greatest.truncate(2)
    least.truncate(-1)
    assert set(greatest.rows) == {(2,), (3,)}
    assert set(least.rows) == {(0,)}


@given(KEYED, st.integers(1, 2**40))
def test_normalizing_changes_what_is_shown_alone(values: list[tuple[int, int]], normal: int) -> None:
    aggregation = aggregated(Function.SUM, values)
    before = results(aggregation)
    ranks = {key: aggregation.rank(row) for key, row in aggregation.rows.items()}
    aggregation.normalize(normal)
    assert results(aggregation) == {key: truncated(Fraction(value, normal)) for key, value in before.items()}
    assert {key: aggregation.rank(row) for key, row in aggregation.rows.items()} == ranks
    aggregation.denormalize()
    assert results(aggregation) == before


def test_results_cannot_be_normalized_by_0() -> None:
    with pytest.raises(ValueError, match="@a: results cannot be normalized by 0"):
        aggregated(Function.SUM, []).normalize(0)


@pytest.mark.parametrize("function", NUMBERS)
@given(values=KEYED, later=KEYED)
def test_clear_keeps_keys_and_begins_anew(
    function: Function, values: list[tuple[int, int]], later: list[tuple[int, int]]
) -> None:
    aggregation = aggregated(function, values)
    aggregation.normalize(2)
    aggregation.clear()
    assert set(aggregation.rows) == {(key,) for key, _ in values}
    empty = {Function.MIN: quotient(2**63 - 1, 2), Function.MAX: -(2**62)}.get(function, 0)
    assert set(results(aggregation).values()) <= {empty}
    aggregation.denormalize()
    for key, value in later:
        aggregation.add((key,), value)
    assert results(aggregation).items() >= results(aggregated(function, later)).items()


def test_what_has_no_room_is_counted() -> None:
    aggregation = Aggregation("a", Function.COUNT, (String(),), max_rows=2)
    for key in "abcbcd":
        aggregation.add((key,))
    assert results(aggregation) == {"a": 1, "b": 2}
    assert aggregation.dropped == 3


def test_a_distribution_has_no_number() -> None:
    aggregation = aggregated(Function.QUANTIZE, [(1, 5)], quantize())
    with pytest.raises(ValueError, match=r"quantize\(\) has no single result"):
        results(aggregation)


def test_distributions_are_ranked_by_their_sum_and_then_by_their_zeros() -> None:
    scale = lquantize(-10, 10)
    aggregation = Aggregation("a", Function.LQUANTIZE, (String(),), scale)
    for key, values in {"low": [-20], "zero": [0], "zeros": [0, 0], "high": [3, -1]}.items():
        for value in values:
            aggregation.add((key,), value)
    ranks = {key[0]: aggregation.rank(row) for key, row in aggregation.rows.items()}
    assert ranks == {"low": (-11, 0), "zero": (0, 1), "zeros": (0, 2), "high": (2, 0)}
    assert aggregation.rank(None) == (0, 0)


def test_keys_are_ordered_without_their_sign_and_from_a_position() -> None:
    assert sorted([(-1,), (0,), (5,)], key=key_rank) == [(0,), (5,), (-1,)]
    pairs = [("b", 1), ("a", 2), ("a", 1)]
    assert sorted(pairs, key=lambda key: key_rank(key, 1)) == [("a", 1), ("b", 1), ("a", 2)]
    assert sorted(pairs, key=lambda key: key_rank(key, 2)) == [("a", 1), ("a", 2), ("b", 1)]


@given(st.integers(), st.sampled_from([8, 16, 32, 64]))
def test_twos_complement(value: int, bits: int) -> None:
    assert -(1 << (bits - 1)) <= signed(value, bits) < 1 << (bits - 1)
    assert (signed(value, bits) - value) % (1 << bits) == 0


def test_types_are_called_as_in_c() -> None:
    assert str(Integer(8, is_signed=False)) == "unsigned char"
