from __future__ import annotations

import pytest

from tests.bench.against import interval


@pytest.mark.parametrize(("count", "expected"), [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (20, (5, 14)), (100, (39, 60))])
def test_median_lies_between_with_95_percent(count: int, expected: tuple[int, int]) -> None:
    assert interval(range(count)) == expected
