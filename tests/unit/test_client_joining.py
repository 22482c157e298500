"""Snapshots of two subscriptions, added up."""

from __future__ import annotations

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.client import Account, Snapshot, SnapshotRow
from stapsdtd.client.joining import joined

_VALUES = st.lists(st.integers(-1000, 1000), max_size=8)


def snapshot(number: int, values: list[int]) -> Snapshot:
    known: dict[str, int | float | None] = {"avg": None, "stddev": None, "sum": None}
    if values:
        known = {"avg": statistics.fmean(values), "stddev": statistics.pstdev(values), "sum": sum(values)}
    row = SnapshotRow((1,), {"count": len(values), "values": len(values), **known})
    account = Account(len(values), 0, 0, 0, 0, 0, 0, 1, aggregated=len(values))
    return Snapshot(number, 0, 5, (row,), account, begin_monotonic_ns=10, end_monotonic_ns=15)


@given(_VALUES, _VALUES)
def test_a_joined_snapshot_is_that_of_all_values(before: list[int], after: list[int]) -> None:
    both, whole = joined(snapshot(3, before), snapshot(2, after)), snapshot(5, before + after)
    assert (both.number, both.account, both.duration_ns) == (5, whole.account, 10)
    (row,), (wanted,) = both.rows, whole.rows
    assert (row.values["count"], row.values["sum"]) == (wanted.values["count"], wanted.values["sum"])
    for name in ("avg", "stddev"):
        found, expected = row.values[name], wanted.values[name]
        assert (found is None) is (expected is None)
        assert found is None or expected is None or math.isclose(found, expected, abs_tol=1e-6)
