"""What D programs print, in DTrace's layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.query.d.aggregations import Aggregation, Function
from stapsdtd.query.d.distribution import picture
from stapsdtd.query.d.print_aggregations import Sorting, printed, remaining
from stapsdtd.query.d.records import Records, raw_bytes, traced
from stapsdtd.query.d.scales import lquantize
from stapsdtd.query.d.values import Bytes, Integer, OwnText, Pointer, String
from tests.conformance import outputs

INT = Integer(32, is_signed=True)
SCALE = lquantize(-5, 5)
COUNTS = st.dictionaries(st.integers(0, len(SCALE.labels) - 1), st.integers(-1000, 1000))


@pytest.mark.parametrize("name", outputs.CASES)
def test_a_program_prints_what_is_expected(name: str) -> None:
    assert outputs.output_of(outputs.program(name)) == outputs.expected(name)


def test_there_is_a_program_for_each_output() -> None:
    assert sorted(path.stem for path in outputs.FOLDER.glob("*.d")) == outputs.CASES
    assert len(outputs.CASES) >= 8


@given(COUNTS)
def test_a_picture_shows_each_count_between_two_empty_bins(counts: dict[int, int]) -> None:
    first, title, *lines, last = picture(SCALE, counts).split("\n")
    assert (first, last) == ("", "")
    assert {len(line) for line in (title, *lines)} == {16 + 1 + 41 + 1 + 9}
    shown = {line[:16].strip(): int(line[-9:]) for line in lines}
    filled = {SCALE.labels[number]: count for number, count in counts.items() if count}
    assert {label: count for label, count in shown.items() if count} == filled
    if filled:
        numbers = [number for number, count in counts.items() if count]
        expected = SCALE.labels[max(min(numbers) - 1, 0) : max(numbers) + 2]
    else:
        expected = SCALE.labels[:3]
    assert tuple(shown) == expected


@given(COUNTS)
def test_bars_are_shares_of_40_columns(counts: dict[int, int]) -> None:
    values = list(counts.values())
    columns = 20 if min(values, default=0) < 0 < max(values, default=0) else 40
    total = sum(map(abs, values))
    bars = sum(line.count("@") for line in picture(SCALE, counts).splitlines())
    # each is rounded by a half at most
    assert abs(bars - (columns if total else 0)) <= len(values) / 2


def test_counts_of_a_distribution_are_normalized_and_its_bars_are_not() -> None:
    lines = picture(lquantize(0, 3), {1: 1999, 2: 1}, 1000).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["<", "0", "|", "0"],
        ["0", "|" + "@" * 40, "1"],
        ["1", "|", "0"],
        ["2", "|", "0"],
    ]


def test_what_printa_printed_is_not_printed_at_the_end() -> None:
    printed_one, empty, left = (Aggregation(name, Function.COUNT) for name in ("printed", "empty", "left"))
    printed_one.add(())
    left.add(())
    left.add(())
    assert printed([printed_one], Sorting()) == "\n                1\n"
    assert printed([empty], Sorting()) == "\n"
    empty.add(())
    assert remaining([printed_one, empty, left], Sorting()) == "                1\n                2\n"


def test_at_the_end_aggregations_come_in_the_programs_order_or_the_other_way_round() -> None:
    aggregations = [Aggregation(name, Function.SUM) for name in ("first", "second")]
    for value, each in enumerate(aggregations, 1):
        each.add((), value)
    assert remaining(aggregations, Sorting(is_reverse=True)).split() == ["2", "1"]


def test_aggregations_are_sorted_at_a_position_that_exists() -> None:
    first, second = Aggregation("a", Function.SUM, (INT,)), Aggregation("b", Function.SUM, (INT,))
    for key, one, other in ((1, 5, 9), (2, 5, 8), (3, 4, 9)):
        first.add((key,), one)
        second.add((key,), other)

    def order(sorting: Sorting) -> list[int]:
        return [int(line.split()[0]) for line in printed([first, second], sorting).splitlines()[1:]]

    assert order(Sorting()) == [3, 2, 1]
    assert order(Sorting(position=1)) == [2, 3, 1]
    assert order(Sorting(position=2)) == [3, 2, 1]
    assert order(Sorting(is_reverse=True)) == [1, 2, 3]
    assert order(Sorting(by_key=True, key_position=7)) == [1, 2, 3]


def test_what_others_chose_is_escaped_wherever_it_is_printed() -> None:
    evil, kind = "a\x1b[2J\n\u202e", String()
    told = traced(kind, evil, is_quiet=True), traced(kind, evil, is_quiet=False)
    assert [each.strip() for each in told] == [r"a\x1b[2J\n\u202e"] * 2
    assert traced(kind, OwnText("a\tb\n"), is_quiet=True) == "a\tb\n"
    written: list[str] = []
    records = Records(written.append, is_quiet=False)
    records.start(0, 1, evil, "n\x9b")
    records.end()
    assert "".join(written).endswith(r"a\x1b[2J\n\u202e:n\x9b " + "\n")


def test_a_record_that_is_discarded_leaves_nothing() -> None:
    written: list[str] = []
    records = Records(written.append, is_quiet=False)
    for is_kept in (False, True, False):
        records.start(0, 1, "main", "tick")
        records.text("hit")
        if is_kept:
            records.end()
        else:
            records.discard()
    records.text("end")
    assert "".join(written).split() == ["CPU", "ID", "FUNCTION:NAME", "0", "1", "main:tick", "hit", "end"]


def test_trace_prints_by_type() -> None:
    assert traced(Pointer(), 0xBEEF, is_quiet=False) == "                48879"
    assert traced(String(), "long" * 10, is_quiet=False) == "  " + "long" * 10
    assert traced(Integer(8, is_signed=False), -1, is_quiet=True) == "255"
    assert traced(Bytes(), b"", is_quiet=True) == ""


def test_bytes_are_printed_as_codes_and_characters() -> None:
    data = bytes(range(0x3A, 0x4E)) + b"\x7f"
    assert raw_bytes(data).splitlines() == [
        "",
        "             0  1  2  3  4  5  6  7  8  9  a  b  c  d  e  f  0123456789abcdef",
        "         0: 3a 3b 3c 3d 3e 3f 40 41 42 43 44 45 46 47 48 49  :;<=>?@ABCDEFGHI",
        "        10: 4a 4b 4c 4d 7f                                   JKLM.",
    ]
    key = Aggregation("a", Function.COUNT, (Bytes(),))
    key.add((b"\0",))
    assert printed([key], Sorting()) == f"\n{raw_bytes(bytes(1))} {1:16}\n"
