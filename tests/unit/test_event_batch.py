from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.events.batch import EventBatch, join, merge
from stapsdtd.events.columns import Strings, ValueColumn
from tests.unit.samples import batch, columns_of, event_rows, signed, strings, unsigned, value_list

TEXTS = st.lists(st.none() | st.binary(max_size=8))
LAYOUTS = st.lists(st.sampled_from([signed, unsigned, strings]), max_size=3)


@st.composite
def of_one_layout(draw: st.DrawFn) -> EventBatch:
    times = draw(st.lists(st.integers(0, 20), max_size=8))
    values: list[ValueColumn] = []
    for make in draw(LAYOUTS):
        if make is strings:
            cells = draw(st.lists(st.none() | st.binary(max_size=3), min_size=len(times), max_size=len(times)))
            values.append(strings(*cells))
        elif make is signed:
            numbers = st.none() | st.integers(-(1 << 63), (1 << 63) - 1)
            values.append(signed(*draw(st.lists(numbers, min_size=len(times), max_size=len(times)))))
        else:
            numbers = st.none() | st.integers(0, (1 << 64) - 1)
            values.append(unsigned(*draw(st.lists(numbers, min_size=len(times), max_size=len(times)))))
    tids = draw(st.lists(st.integers(1, 5), min_size=len(times), max_size=len(times)))
    return batch(times, *values, tid=tids)


BATCHES = st.lists(of_one_layout(), min_size=1, max_size=5)
MIXED = BATCHES.map(join)


def check(found: EventBatch) -> None:
    """Each event is in one table, and each table has a layout of its own."""
    layouts = [table.layout for table in found.tables]
    assert len(set(layouts)) == len(layouts)
    rows = [table.positions(len(found)).tolist() for table in found.tables]
    assert sorted(row for of_table in rows for row in of_table) == list(range(len(found)))
    assert all(of_table == sorted(of_table) for of_table in rows)
    if len(found.tables) == 1:
        assert found.tables[0].rows is None


@given(TEXTS)
def test_strings_round_trip(texts: list[bytes | None]) -> None:
    column = Strings.of(texts)
    assert column.tolist() == texts
    assert (column.unavailable is None) == (None not in texts)


@given(st.data(), MIXED)
def test_take_takes_the_rows_in_their_order(data: st.DataObject, found: EventBatch) -> None:
    rows = data.draw(st.permutations(range(len(found))).flatmap(lambda order: st.sampled_from([order[:3], order])))
    taken = found.take(np.array(rows, np.intp))
    check(taken)
    assert event_rows(taken) == [event_rows(found)[row] for row in rows]


@given(st.data(), MIXED)
def test_slice_has_consecutive_events(data: st.DataObject, found: EventBatch) -> None:
    begin = data.draw(st.integers(0, len(found)))
    end = data.draw(st.integers(begin, len(found)))
    part = found.slice(begin, end)
    check(part)
    assert event_rows(part) == event_rows(found)[begin:end]


@given(MIXED)
def test_events_of_one_layout_are_a_batch_of_their_own(found: EventBatch) -> None:
    rows: dict[int, tuple[object, ...]] = {}
    for positions, part in found.homogeneous():
        check(part)
        assert len(part.tables) == 1
        rows.update(zip(positions.tolist(), event_rows(part), strict=True))
    assert [rows[position] for position in range(len(found))] == event_rows(found)


@given(BATCHES)
def test_join_keeps_the_order(batches: list[EventBatch]) -> None:
    joined = join(batches)
    check(joined)
    assert event_rows(joined) == [row for each in batches for row in event_rows(each)]


@given(BATCHES)
def test_merge_keeps_every_event_and_sorts_by_time(batches: list[EventBatch]) -> None:
    merged = merge(batches)
    check(merged)
    rows = [row for each in batches for row in event_rows(each)]
    # stable, so that the order of one thread's events within one moment stays
    assert event_rows(merged) == sorted(rows, key=lambda row: int(str(row[0])))


def test_merge_of_one_batch_in_order_copies_nothing() -> None:
    found = batch([1, 1, 2], signed(1, 2, 3))
    assert merge([found]) is found


def test_merge_of_sorted_batches_copies_no_strings() -> None:
    texts = batch([1, 4, 5], strings(b"a", None, b"c"))
    merged = merge([texts, batch([2, 3], signed(1, 2))])
    assert [row[0] for row in event_rows(merged)] == [1, 2, 3, 4, 5]
    assert texts.tables[0].columns in [table.columns for table in merged.tables]


def test_unavailable_values_stay_where_they_were() -> None:
    merged = merge([batch([3], signed(None)), batch([1, 2], signed(5, 6))])
    assert value_list(columns_of(merged)[0]) == [5, 6, None]
    merged = merge([batch([3], strings(None)), batch([1, 2], strings(b"", b"x"))])
    assert value_list(columns_of(merged)[0]) == [b"", b"x", None]


@given(MIXED)
def test_each_event_has_its_share_of_the_size(found: EventBatch) -> None:
    assert found.row_bytes().sum() == found.nbytes


def test_size_counts_every_column() -> None:
    empty = batch([])
    assert empty.nbytes == 0
    assert batch([1]).nbytes == 8 + 4 + 4 + 2 + 16 + 4
    assert batch([1], signed(1), strings(b"four")).nbytes == batch([1]).nbytes + 8 + 4 + 4


def test_events_by_site() -> None:
    mixed = join([
        batch([1, 2, 3], unsigned(1, 2, 3), site_id=[7, 8, 7]), batch([4, 5], strings(b"a", b"b"), site_id=[8, 8]),
    ])  # fmt: skip
    found = [(site_id, rows.tolist(), event_rows(events)) for site_id, rows, events in mixed.by_site()]
    rows = event_rows(mixed)
    assert found == [(7, [0, 2], [rows[0], rows[2]]), (8, [1], [rows[1]]), (8, [3, 4], rows[3:])]
