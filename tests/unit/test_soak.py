"""What is compared with what at the end of `./dev soak`."""

from __future__ import annotations

from tests.soak import Sample, growth


def samples(*anonymous_mib: int) -> list[Sample]:
    """One each minute, the first after one."""
    return [Sample(60.0 * number, number, mib << 10, 0, 0) for number, mib in enumerate(anonymous_mib, 1)]


def test_end_is_compared_with_a_sixth_of_the_time() -> None:
    warming, resting = list(range(30, 39)), [50] * 46
    assert growth(samples(*warming, *resting, *[51] * 5), 3600) == (50, 51)


def test_single_samples_do_not_count() -> None:
    assert growth(samples(*[40] * 9, 90, *[50] * 48, 90, 50), 3600) == (50, 50)
