"""Grouping by numpy agrees with adding events up one by one."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.aggregate.aggregation import Aggregation, Function, HitField, Key, Row
from stapsdtd.aggregate.buckets import POWERS_OF_TWO
from stapsdtd.aggregate.grouping import group
from stapsdtd.aggregate.table import Table
from stapsdtd.events.batch import EventBatch, ValueTable, join
from stapsdtd.events.columns import Numbers, Strings
from stapsdtd.model import Capture

TEXT, VALUE = Capture(1, is_string=True), Capture(0)
ALL = Aggregation(
    tuple(Function),
    keys=(TEXT, HitField.PID, HitField.EXECNAME, HitField.CPU, HitField.NAME),
    value=VALUE,
    buckets=POWERS_OF_TWO,
)

ROOM = 1 << 30

Hit = tuple[int | None, bytes | None, int, bytes, int, int]
"""value, text, pid, comm, cpu, site id"""

signed_hits = st.tuples(
    st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 3),
    st.none() | st.sampled_from([b"", b"one", b"two"]),
    st.integers(1, 2),
    st.sampled_from([b"a", b"b"]),
    st.integers(0, 1),
    st.integers(1, 2),
)


def batch_of(hits: Sequence[Hit], *, signed: bool = True) -> EventBatch:
    values, texts, pids, comms, cpus, sites = zip(*hits, strict=True)
    missing = np.array([value is None for value in values])
    numbers = [value or 0 for value in values]
    data = np.array(numbers, np.int64) if signed else np.array(numbers, np.uint64)
    columns = (Strings.of(texts), Numbers(data, missing if missing.any() else None))
    return EventBatch(
        np.arange(len(hits)), np.array(pids, np.int32), np.array(pids, np.int32), np.array(cpus, np.uint16),
        np.array(comms, "S16"), np.array(sites, np.uint32), (ValueTable(columns),),
    )  # fmt: skip


def site_value(site_id: int, field: HitField) -> bytes:
    return f"{field}{site_id}".encode()


def one_by_one(hits: Sequence[Hit]) -> dict[Key, list[int | None]]:
    values: dict[Key, list[int | None]] = defaultdict(list)
    for value, text, pid, comm, cpu, site in hits:
        values[text, pid, comm, cpu, f"name{site}".encode()].append(value)
    return values


def check(rows: dict[Key, Row], hits: Sequence[Hit]) -> None:
    expected = one_by_one(hits)
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        values = [value for value in expected[key] if value is not None]
        assert (row.count, row.values, row.total) == (len(expected[key]), len(values), sum(values))
        assert (row.low, row.high) == (min(values, default=None), max(values, default=None))
        assert sum(row.buckets.values()) == len(values)
        assert row.average == (sum(values) / len(values) if values else None)
        if values:
            spread = max(map(abs, values))
            assert row.deviation is not None
            assert math.isclose(row.deviation, statistics.pstdev(values), rel_tol=1e-6, abs_tol=spread * 1e-9)
        for value in values:
            assert any(low <= value <= high for low, high in map(POWERS_OF_TWO.bounds, row.buckets))


@given(st.lists(signed_hits, min_size=1, max_size=60))
def test_a_batch_is_grouped_as_its_events_are_one_by_one(hits: list[Hit]) -> None:
    check(group(ALL, batch_of(hits), site_value), hits)


def test_sites_of_one_probe_have_one_key() -> None:
    aggregation = Aggregation((Function.COUNT,), (HitField.NAME, TEXT), VALUE)
    hits = batch_of([(1, b"x", 1, b"a", 0, site_id) for site_id in (1, 2, 3)])
    rows = group(aggregation, hits, lambda site_id, _: b"even" if site_id == 2 else b"odd")
    assert {key: row.count for key, row in rows.items()} == {(b"odd", b"x"): 2, (b"even", b"x"): 1}


@given(st.lists(st.lists(signed_hits, min_size=1, max_size=20), min_size=1, max_size=5))
def test_a_table_adds_batches_up(batches: list[list[Hit]]) -> None:
    table = Table(ALL, 0, ROOM)
    for hits in batches:
        assert table.add(group(ALL, batch_of(hits), site_value)) == 0
    everything = [hit for hits in batches for hit in hits]
    assert table.hits == len(everything)
    check(dict(table.take(1).rows), everything)


def test_unsigned_sums_do_not_wrap() -> None:
    greatest = (1 << 64) - 1
    aggregation = Aggregation((Function.SUM,), value=VALUE)
    columns = ValueTable((Numbers(np.array([greatest] * 3, np.uint64)),))
    whole = batch_of([(0, b"", 1, b"", 0, 1)] * 3)
    batch = EventBatch(whole.time_ns, whole.pid, whole.tid, whole.cpu, whole.comm, whole.site_id, (columns,))
    (row,) = group(aggregation, batch, site_value).values()
    assert (row.total, row.low, row.high) == (3 * greatest, greatest, greatest)


def test_sites_may_declare_the_value_differently() -> None:
    """Signed at one, unsigned at the other: in different tables of a batch."""
    batch = join([batch_of([(-1, b"x", 1, b"a", 0, 1)]), batch_of([(1 << 63, b"x", 1, b"a", 0, 1)], signed=False)])
    (row,) = group(ALL, batch, site_value).values()
    assert (row.count, row.total, row.low, row.high) == (2, (1 << 63) - 1, -1, 1 << 63)


def test_floating_point_values() -> None:
    aggregation = Aggregation((Function.AVG,), value=VALUE, buckets=POWERS_OF_TWO)
    whole = batch_of([(0, b"", 1, b"", 0, 1)] * 4)
    columns = ValueTable((Numbers(np.array([0.5, 1.5, -2.5, 1e300])),))
    batch = EventBatch(whole.time_ns, whole.pid, whole.tid, whole.cpu, whole.comm, whole.site_id, (columns,))
    (row,) = group(aggregation, batch, site_value).values()
    assert (row.low, row.high, row.count) == (-2.5, 1e300, 4)
    assert sum(row.buckets.values()) == 4


def test_what_is_no_number_is_no_value_and_no_key() -> None:
    aggregation = Aggregation((Function.MIN,), keys=(VALUE,), value=VALUE)
    whole = batch_of([(0, b"", 1, b"", 0, 1)] * 3)
    columns = ValueTable((Numbers(np.array([float("nan"), 2.0, float("nan")])),))
    batch = EventBatch(whole.time_ns, whole.pid, whole.tid, whole.cpu, whole.comm, whole.site_id, (columns,))
    table = Table(aggregation, 0, ROOM)
    for _ in range(2):
        assert table.add(group(aggregation, batch, site_value)) == 0
    rows = table.take(1).rows
    assert {key: (row.count, row.low) for key, row in rows.items()} == {(None,): (4, None), (2.0,): (2, 2.0)}


class TestTable:
    def test_keys_beyond_its_size_have_no_room_and_others_go_on(self) -> None:
        table = Table(Aggregation((Function.COUNT,), max_keys=2), 0, ROOM)
        assert table.add({(1,): Row(5), (2,): Row(6)}) == 0
        assert table.add({(1,): Row(1), (3,): Row(7)}) == 7
        assert {key: row.count for key, row in table.take(1).rows.items()} == {(1,): 6, (2,): 6}
        assert table.hits == 12

    def test_rows_and_buckets_take_memory_that_is_bounded(self) -> None:
        table = Table(Aggregation((Function.HISTOGRAM,), is_cumulative=True), 0, 20_000)
        lost = sum(table.add({(b"key",): Row(1, buckets={bucket: 1})}) for bucket in range(1000))
        (row,) = table.take(1).rows.values()
        assert row.count == len(row.buckets) == 1000 - lost
        assert 100 < row.count < 200
        # what is known has room
        assert table.add({(b"key",): Row(5, buckets={0: 5})}) == 0
        assert table.add({(b"other",): Row(1)}) == 1
        assert table.hits + lost + 1 == 1006

    def test_intervals_are_disjoint_and_adjacent(self) -> None:
        table = Table(Aggregation((Function.COUNT,)), 10, ROOM)
        table.add({(): Row(1)})
        first = table.take(20)
        table.add({(): Row(2)})
        second = table.take(30)
        assert [(each.number, each.begin_ns, each.end_ns, each.rows[()].count) for each in (first, second)] == [
            (1, 10, 20, 1), (2, 20, 30, 2),
        ]  # fmt: skip
        assert (first.hits, second.hits) == (1, 3)
        assert table.last is second
        assert table.taken_from(1) == [first, second]
        assert table.taken_from(2) == [second]

    def test_snapshots_are_kept_as_long_as_there_is_room(self) -> None:
        table = Table(Aggregation((Function.COUNT,)), 0, 20_000)
        for number in range(1, 1001):
            table.add({(): Row(number)})
            table.take(number)
        kept = [each.number for each in table.taken_from(1)]
        assert kept == list(range(1001 - len(kept), 1001))
        assert 10 < len(kept) < 30

    @pytest.mark.parametrize("count", [1, 3])
    def test_cumulative_snapshots_do_not_change_later(self, count: int) -> None:
        table = Table(Aggregation((Function.COUNT,), is_cumulative=True), 10, ROOM)
        for _ in range(count):
            table.add({(): Row(1, buckets={1: 1})})
        snapshot = table.take(20)
        table.add({(): Row(1, buckets={1: 1})})
        assert (snapshot.begin_ns, snapshot.rows[()].count, snapshot.rows[()].buckets) == (10, count, {1: count})
        later = table.take(30)
        assert later.rows[()].count == count + 1
        assert table.taken_from(1) == [later]
