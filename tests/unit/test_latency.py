"""How long something takes, in buckets."""

from __future__ import annotations

import pytest

from stapsdtd.runtime.latency import BOUNDS, Latency


def test_a_bound_belongs_to_its_bucket_and_what_is_beyond_to_the_last() -> None:
    latency = Latency()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1], BOUNDS[-1] + 1):
        latency.observe(seconds)
    found = latency.distribution()
    assert [(number, count) for number, count in enumerate(found.counts) if count] == [
        (0, 2), (1, 1), (len(BOUNDS) - 1, 1), (len(BOUNDS), 1),
    ]  # fmt: skip
    assert found.total_seconds == pytest.approx(BOUNDS[0] * 2.01 + 2 * BOUNDS[-1] + 1)


def test_what_fails_is_measured_too() -> None:
    latency = Latency()
    with pytest.raises(ValueError, match="no"), latency.measured():
        raise ValueError("no")
    with latency.measured():
        pass
    found = latency.distribution()
    assert sum(found.counts) == 2
    assert 0 < found.total_seconds < 20
