from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.events.columns import Block, Strings, ValueColumn, merge
from tests.unit.samples import block, event_rows, signed, strings, unsigned, value_list

TEXTS = st.lists(st.none() | st.binary(max_size=8))
LAYOUTS = st.lists(st.sampled_from([signed, unsigned, strings]), max_size=3)


@st.composite
def blocks(draw: st.DrawFn, layout: st.SearchStrategy[list[object]] = LAYOUTS) -> Block:  # type: ignore[assignment]
    times = draw(st.lists(st.integers(0, 20), max_size=8))
    values: list[ValueColumn] = []
    for make in draw(layout):
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
    return block(times, *values, tid=tids)


@given(TEXTS)
def test_strings_round_trip(texts: list[bytes | None]) -> None:
    column = Strings.of(texts)
    assert column.tolist() == texts
    assert (column.unavailable is None) == (None not in texts)


@given(st.data(), blocks())
def test_take_takes_the_rows_in_their_order(data: st.DataObject, found: Block) -> None:
    rows = data.draw(st.lists(st.integers(0, len(found) - 1)) if len(found) else st.just([]))
    taken = found.take(np.array(rows, np.intp))
    assert event_rows(taken) == [event_rows(found)[row] for row in rows]
    assert taken.layout == found.layout


@given(st.lists(blocks(), max_size=5))
def test_merge_keeps_every_event_and_sorts_by_time(found: list[Block]) -> None:
    merged = merge(found)
    assert len({each.layout for each in merged}) == len(merged)
    for result in merged:
        rows = [row for each in found if each.layout == result.layout for row in event_rows(each)]
        # stable, so that the order of one thread's events within one moment stays
        assert event_rows(result) == sorted(rows, key=lambda row: int(str(row[0])))
    assert {each.layout for each in merged} == {each.layout for each in found}


def test_merge_of_one_block_in_order_copies_nothing() -> None:
    found = block([1, 1, 2], signed(1, 2, 3))
    assert merge([found]) == [found]
    assert merge([found])[0] is found


def test_unavailable_values_stay_where_they_were() -> None:
    (merged,) = merge([block([3], signed(None)), block([1, 2], signed(5, 6))])
    assert value_list(merged.values[0]) == [5, 6, None]
    (merged,) = merge([block([3], strings(None)), block([1, 2], strings(b"", b"x"))])
    assert value_list(merged.values[0]) == [b"", b"x", None]


def test_size_counts_every_column() -> None:
    empty = block([])
    assert empty.nbytes == 0
    assert block([1]).nbytes == 8 + 4 + 4 + 2 + 16 + 4
    assert block([1], signed(1), strings(b"four")).nbytes == block([1]).nbytes + 8 + 4 + 4
