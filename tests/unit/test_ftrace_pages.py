from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.capture.ftrace.format import PageFormat
from stapsdtd.capture.ftrace.pages import Records, parse_pages
from tests.unit.ring_pages import (
    HEADER,
    PAGE_BYTES,
    ROOM,
    Data,
    Discarded,
    Extend,
    Piece,
    Stamp,
    decoded,
    encoded,
    page,
)

FORMAT = PageFormat(HEADER, PAGE_BYTES)
START = 5_000_000_000_000

DELTAS = st.integers(0, (1 << 27) - 1)
RUNS = st.builds(
    lambda count, words, delta: [Data(delta, bytes([words]) * (4 * words))] * count,
    st.integers(1, 40), st.integers(1, 28), DELTAS,
)  # fmt: skip
SINGLES = st.lists(
    st.one_of(
        st.builds(Data, DELTAS, st.binary(max_size=40)),
        st.builds(Data, DELTAS, st.binary(min_size=100, max_size=300)),
        st.builds(Data, DELTAS, st.binary(max_size=12), st.just(value=True)),
        st.builds(Extend, st.integers(0, 1 << 40)),
        st.builds(Discarded, st.integers(1, 100), st.integers(1, 20)),
    ),
    max_size=12,
)


def fitting(pieces: list[Piece]) -> list[Piece]:
    """As many as a page takes."""
    kept: list[Piece] = []
    room = ROOM - 8
    for piece in pieces:
        room -= len(encoded(piece))
        if room < 0:
            break
        kept.append(piece)
    return kept


@st.composite
def pages(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(RUNS | SINGLES, max_size=6))
    pieces = fitting([piece for part in parts for piece in part])
    time = draw(st.integers(0, 1 << 60))
    return page(time, *pieces, missed=draw(st.booleans()), ends_in_padding=draw(st.booleans()))


def parsed(*data: bytes) -> Records:
    return parse_pages(3, list(data), FORMAT)


def times(records: Records) -> list[int]:
    return [int(time) for time in records.time_ns]


@given(st.lists(pages(), max_size=3))
def test_pages_give_what_the_simple_decoder_gives(data: list[bytes]) -> None:
    records = parsed(*data)
    expected = [
        (time, number * PAGE_BYTES + start) for number, each in enumerate(data) for time, start, _ in decoded(each)
    ]
    assert list(zip(times(records), records.starts.tolist(), strict=True)) == expected
    assert all(start % 4 == 0 for _, start in expected)
    assert records.cpu == 3
    assert records.content == b"".join(data)


def test_reference_decoder_itself() -> None:
    data = page(START, Data(5, b"abcd"), Extend(1 << 30), Data(1, b"x" * 200), Discarded(7, 3), Data(2, b"efgh"))
    assert [(time - START, content) for time, _, content in decoded(data)] == [
        (5, b"abcd"), ((1 << 30) + 6, b"x" * 200), ((1 << 30) + 15, b"efgh"),
    ]  # fmt: skip


def test_runs_of_one_length_keep_their_times() -> None:
    lengths = [4] * 50 + [8] * 3 + [4] * 20 + [12] * 9
    records = parsed(page(START, *(Data(number, b"z" * length) for number, length in enumerate(lengths))))
    assert times(records) == [START + int(total) for total in np.cumsum(np.arange(len(lengths)))]


def test_time_extend_in_the_middle_of_a_run_and_before_it() -> None:
    records = parsed(page(START, Extend(1 << 40), *[Data(1, b"abcd")] * 10, Extend(100), *[Data(1, b"abcd")] * 10))
    first = START + (1 << 40)
    assert times(records) == [*range(first + 1, first + 11), *range(first + 111, first + 121)]


def test_absolute_stamp_keeps_the_bits_above_its_own() -> None:
    above = 3 << 59
    records = parsed(page(above + 17, Stamp(1 << 50), Data(2, b"abcd")))
    assert times(records) == [above + (1 << 50) + 2]


def test_padding_ends_a_page_and_a_discarded_record_does_not() -> None:
    records = parsed(
        page(START, Data(1, b"abcd"), Discarded(1, 5), Data(1, b"abcd"), ends_in_padding=True),
        page(START + 100, Data(1, b"abcd")),
    )
    assert times(records) == [START + 1, START + 3, START + 101]


def test_flags_of_missed_events_are_no_length() -> None:
    assert len(parsed(page(START, *[Data(1, b"abcd")] * 20, missed=True))) == 20


def test_full_page() -> None:
    assert len(parsed(page(START, *[Data(0, b"abcd")] * (ROOM // 8)))) == 510
    assert len(parsed(page(START, Data(0, bytes(ROOM - 8))))) == 1


def test_nothing() -> None:
    assert len(parsed()) == 0
    assert len(parsed(page(START))) == 0
    assert len(parsed(page(START, Extend(5)))) == 0


@pytest.mark.parametrize(("at", "before"), [(START, 0), (START + 1, 1), (START + 3, 3), (START + 99, 5)])
def test_split_by_time_and_join_again(at: int, before: int) -> None:
    records = parsed(page(START, *(Data(1, b"abc%d" % number) for number in range(5))))
    earlier, later = records.split(at)
    assert (len(earlier), len(later)) == (before, 5 - before)
    if before:
        assert earlier.time_ns[-1] <= at
    joined = earlier.followed_by(later)
    assert times(joined) == times(records)
    words = [joined.content[start : start + 4] for start in joined.starts.tolist()]
    assert words == [b"abc%d" % number for number in range(5)]
