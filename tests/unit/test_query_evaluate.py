from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.events.columns import Numbers, Strings, ValueColumn
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.model import Argument, BuiltIn, Capture, Site, Unavailable
from stapsdtd.query.columns import Hits, Values, run
from stapsdtd.query.compile import compile_for, compile_numbers, is_unsigned, why_not_calculated
from stapsdtd.query.evaluate import evaluate, truth_of
from stapsdtd.query.expression import Arithmetic, Condition, Expression
from stapsdtd.query.needs import needs, why_not_at
from stapsdtd.query.numbers import folded
from stapsdtd.query.parse import parse, parse_value
from stapsdtd.query.site_filter import SiteFilter
from stapsdtd.query.text import text_of
from tests.fuzz.examples import examples
from tests.unit.expressions import (
    EDGES,
    SITE,
    TEXTS,
    Row,
    Scalar,
    buffers,
    calculated,
    conditions,
    integers,
    numbers,
    result,
    strings,
)
from tests.unit.samples import RDI, argument, batch, captured, site, value_list

INTEGERS = [edge for edge in EDGES if -(1 << 63) <= edge < 1 << 64]
FLOAT = Argument("8@%xmm0", 8, signed=True, is_float=True, operand=RDI)


def find_cgroup(path: str) -> CgroupInfo | None:
    return CgroupInfo(7, path.count("/"))


def value(text: str) -> Expression:
    return parse_value(text, find_cgroup)


def column_of(capture: Capture, at: Site, values: Sequence[Scalar | None]) -> ValueColumn:
    if capture.is_pointed_to or capture.subject in {BuiltIn.CGROUP, BuiltIn.CONTAINER}:
        return Strings.of(cast("Sequence[bytes | None]", values))
    missing = np.array([each is None for each in values], np.bool_)
    unavailable, numbers = missing if missing.any() else None, [each or 0 for each in values]
    declared = at.arguments[capture.subject] if isinstance(capture.subject, int) else argument()
    if declared.is_float:
        return Numbers(np.array(numbers, np.float64), unavailable)
    if declared.signed:
        return Numbers(np.array(numbers, np.int64), unavailable)
    return Numbers(np.array(numbers, np.uint64), unavailable)


def events_of(at: Site, rows: Sequence[Row], captures: Sequence[Capture]) -> SiteEvents:
    columns = [column_of(each, at, [row.values[each] for row in rows]) for each in captures]
    made = batch(
        [row.time_ns for row in rows], *columns, pid=[row.pid for row in rows], cpu=[row.cpu for row in rows],
        comm=[row.comm for row in rows],
    )  # fmt: skip
    return SiteEvents(at, "app", captures, made)


def one(text: str, values: Mapping[str, Scalar | None], at: Site = SITE) -> object:
    """Evaluate an expression of one event. values: of arguments, and of what arg1 points to as str1 and buf1."""
    parsed = value(text)
    found = {
        each: values[each.subject.value] if isinstance(each.subject, BuiltIn)
        else values[f"{'str' if each.is_string else 'buf' if each.is_buffer else 'arg'}{each.subject}"]
        for each in needs(parsed)
    }  # fmt: skip
    row = Row(4711, 3, 1000, b"app", found)
    (told,) = value_list(evaluate(parsed, events_of(at, [row], needs(parsed))))
    return told


def hits_of(events: SiteEvents, arguments: Mapping[int, Values]) -> Hits:
    of = events.batch
    return Hits(of.pid, of.tid, of.comm, arguments, of.cpu, of.time_ns)


def drawn_rows(data: st.DataObject, captures: Sequence[Capture], *, is_all_known: bool = False) -> list[Row]:
    kinds: dict[Capture, st.SearchStrategy[Scalar | None]] = {}
    for capture in captures:
        assert isinstance(capture.subject, int)
        declared = SITE.arguments[capture.subject]
        known: st.SearchStrategy[Scalar] = integers(8 * declared.size, signed=declared.signed)
        if capture.is_string:
            known = TEXTS.map(operator.itemgetter(slice(capture.max_bytes)))
        if capture.is_buffer:
            assert capture.max_bytes is not None
            known = st.sampled_from([bytes([byte] * capture.max_bytes) for byte in b"\0a*"])
        kinds[capture] = known if is_all_known else st.none() | known
    rows = st.builds(
        Row,
        st.integers(1, 1 << 22), st.integers(0, 255), st.integers(0, (1 << 63) - 1),
        st.sampled_from([b"", b"app", b"psql"]), st.fixed_dictionaries(kinds),
    )  # fmt: skip
    return data.draw(st.lists(rows, min_size=1, max_size=5))


@examples(100)
@given(numbers() | strings() | buffers() | conditions(), st.data())
def test_columns_say_what_each_row_does(expression: Expression, data: st.DataObject) -> None:
    parsed = value(text_of(expression))
    rows = drawn_rows(data, needs(parsed))
    told = value_list(evaluate(parsed, events_of(SITE, rows, needs(parsed))))
    assert told == [result(expression, SITE, row) for row in rows]


@examples(50)
@given(conditions(), st.data())
def test_what_is_accepted_is_known_to_hold(expression: Expression, data: st.DataObject) -> None:
    parsed = parse(text_of(expression), find_cgroup)
    rows = drawn_rows(data, needs(parsed))
    told = truth_of(parsed, events_of(SITE, rows, needs(parsed))).known
    assert told.tolist() == [result(expression, SITE, row) is True for row in rows]


@examples(50)
@given(st.lists(conditions(simple=True) | conditions(), min_size=1, max_size=3), st.data())
def test_what_is_tested_and_what_is_evaluated_late_make_up_the_filter(
    parts: list[Condition], data: st.DataObject
) -> None:
    whole = parse(" && ".join(f"({text_of(part)})" for part in parts), find_cgroup)
    site_filter = SiteFilter.of(whole, captured(SITE))
    rows = drawn_rows(data, site_filter.captures, is_all_known=True)
    events = events_of(SITE, rows, site_filter.captures)
    found = np.ones(len(rows), np.bool_)
    if site_filter.tested is not None:
        columns = [each for each in events.batch.tables[0].columns if isinstance(each, Numbers)]
        arguments = {index: Values(columns[index].data.view(np.uint64)) for index in range(len(SITE.arguments))}
        hits = hits_of(events, arguments)
        found &= run(compile_for(site_filter.tested, SITE), hits).accepted
    if site_filter.evaluated is not None:
        found &= truth_of(site_filter.evaluated, events).known
    assert found.tolist() == [all(result(part, SITE, row) is True for part in parts) for row in rows]


@examples(100)
@given(st.lists(numbers() | conditions(simple=True), min_size=1, max_size=3), st.integers(0, 90), st.data())
def test_programs_calculate_what_is_evaluated(written: list[Expression], first_word: int, data: st.DataObject) -> None:
    wanted = [value(text_of(each)) for each in written]
    captures = tuple(dict.fromkeys(capture for each in wanted for capture in needs(each)))
    rows = drawn_rows(data, captures)
    events = events_of(SITE, rows, captures)
    columns = [events.captured(capture) for capture in captures]
    arguments = {
        capture.subject: Values(column.data.view(np.uint64), column.unavailable)
        for capture, column in zip(captures, columns, strict=True)
        if isinstance(column, Numbers) and isinstance(capture.subject, int)
    }
    assert [why_not_calculated(each, SITE) for each in wanted] == [None] * len(wanted)
    outcome = run(compile_numbers(wanted, SITE, first_word), hits_of(events, arguments))
    accepted, words = outcome.accepted, outcome.words
    assert accepted.all()
    for word, each in enumerate(wanted, first_word):
        bits = words[word].data if is_unsigned(each, SITE) else words[word].data.view(np.int64)
        told = value_list(Numbers(bits, words[word].unreadable))
        assert (
            told
            == value_list(evaluate(each, events))
            == [result(written[word - first_word], SITE, row) for row in rows]
        )


@examples(100)
@given(numbers() | strings() | buffers() | conditions())
def test_what_is_written_out_is_read_back(expression: Expression) -> None:
    parsed = value(text_of(expression))
    assert value(text_of(parsed)) == parsed
    assert why_not_at(parsed, SITE.arguments) is None


@given(st.sampled_from(Arithmetic), st.sampled_from(INTEGERS), st.sampled_from(INTEGERS))
def test_constants_are_calculated_as_values_are(how: Arithmetic, left: int, right: int) -> None:
    assume(right or how not in {Arithmetic.DIVIDE, Arithmetic.REMAINDER})
    expected, _ = calculated(how, (left, left >= 1 << 63), (right, right >= 1 << 63))
    assert folded(how, left, right) == expected


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("arg0 - 5", {"arg0": 3}, -2),
        ("arg1 - 5", {"arg1": 3}, (1 << 64) - 2),
        ("arg2 - 5", {"arg2": 3}, -2),
        ("arg2 - 5 < 0", {"arg2": 3}, 1),
        ("arg1 - 5 < 0", {"arg1": 3}, 0),
        ("arg0 / 2", {"arg0": -7}, -3),
        ("arg0 % 4", {"arg0": -7}, -3),
        ("arg3 / -1", {"arg3": -(1 << 63)}, -(1 << 63)),
        ("arg3 % -1", {"arg3": -(1 << 63)}, 0),
        ("5 / arg0", {"arg0": 0}, None),
        ("5 % arg1", {"arg1": 0}, None),
        ("arg0 ? 5 / arg0 : 1", {"arg0": 0}, 1),
        ("arg0 >> 1", {"arg0": -2}, -1),
        ("arg1 >> 63", {"arg1": 1 << 63}, 1),
        ("arg0 << 65", {"arg0": 1}, 2),
        ("-arg0", {"arg0": 7}, -7),
        ("ntohs(arg0)", {"arg0": 0x1234}, 0x3412),
        ("ntohs(arg0)", {"arg0": -2}, 0xFEFF),
        ("ntohl(arg2)", {"arg2": 0x7F00_0001}, 0x0100_007F),
        ("ntohll(arg1)", {"arg1": 1}, 1 << 56),
        ("ntohs(arg0) - 1 > 0", {"arg0": 0}, 1),
        ("~arg0 & 0xff", {"arg0": 1}, 0xFE),
        ("2 + 3 * 4 - 1 == arg0", {"arg0": 13}, 1),
        ("1 << 2 + 1 == arg0", {"arg0": 8}, 1),
        ("arg0 | 1 ^ 3 & 2 == 5", {"arg0": 4}, 0),
        ("arg0 < arg1", {"arg0": -1, "arg1": 0}, 1),
        ("arg1 > arg0", {"arg0": -1, "arg1": (1 << 64) - 1}, 1),
        ("arg1 == arg0", {"arg0": -1, "arg1": (1 << 64) - 1}, 0),
        ("arg0 == 1 || arg3 == 1", {"arg0": 1, "arg3": None}, 1),
        ("arg0 == 1 || arg3 == 1", {"arg0": None, "arg3": 1}, None),
        ("arg0 == 1 && arg3 == 1", {"arg0": 0, "arg3": None}, 0),
        ("arg0 == 1 && arg3 == 1", {"arg0": 1, "arg3": None}, None),
        ("!(arg0 + 1 == 1)", {"arg0": None}, None),
        ('str(arg1) ~ "SELECT*"', {"str1": b"SELECT 1"}, 1),
        ('str(arg1) ~ "SELECT"', {"str1": b"SELECT 1"}, 0),
        ('str(arg1) ~ "*[0-9]\n?"', {"str1": b"a1\n2"}, 1),
        ('!str(arg1) ~ "s*"', {"str1": b"SELECT 1"}, 1),
        ('str(arg1) ~ "*"', {"str1": None}, None),
        ("str(arg1, arg0)", {"str1": b"main and more", "arg0": 4}, b"main"),
        ("str(arg1, arg0)", {"str1": b"main", "arg0": -4}, b""),
        ("str(arg1, arg0)", {"str1": b"main", "arg0": None}, None),
        ("arg0 > 1 ? str(arg1) : 'few'", {"arg0": 1, "str1": b"many"}, b"few"),
        ("buf(arg1, 4)", {"buf1": b"a\0\xffb"}, b"a\0\xffb"),
        ("buf(arg1, 4)", {"buf1": None}, None),
        ('buf(arg1, 4) == "a\\x00\\xffb"', {"buf1": b"a\0\xffb"}, 1),
        ('"a\\x00bc" != buf(arg1, 4)', {"buf1": b"a\0\xffb"}, 1),
        ("buf(arg1, 2) == buf(arg3, 2)", {"buf1": b"a\0", "buf3": b"a\0"}, 1),
        ("buf(arg1, 2) == buf(arg3, 2)", {"buf1": b"a\0", "buf3": None}, None),
        ('buf(arg1, 4) ~ "*\\x00*"', {"buf1": b"a\0\xffb"}, 1),
        ("arg0 ? arg3 == 1 : arg1 == 1", {"arg0": 0, "arg3": None, "arg1": 1}, 1),
        ("cpu * 10 + (pid == 4711 ? 1 : 0)", {}, 31),
        ("provider == 'app' && name == 'tick' && module ~ 'a?p' && function == ''", {}, 1),
        ("timestamp / 1000", {}, 1),
        ("uid + gid", {"uid": 1000, "gid": 2}, 1002),
        ('container ~ "web*" ? 1 : 0', {"container": b"web-1"}, 1),
        ('cgroup == "/a" || 1 == arg0 + 0', {"cgroup": b"/a/b", "arg0": 0}, 1),
        ('cgroup == "/a" || 1 == arg0 + 0', {"cgroup": b"/ab", "arg0": 0}, 0),
        ('cgroup != "/" || 1 == arg0 + 0', {"cgroup": b"/", "arg0": 0}, 0),
        ('cgroup ~ "/a*"', {"cgroup": b"/ab"}, 1),
    ],
)  # fmt: skip
def test_results(text: str, values: dict[str, Scalar | None], expected: object) -> None:
    assert one(text, values) == expected


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("arg0 + 1", 0.5, 1.5),
        ("arg0 / 2 > 0.2", 0.5, 1),
        ("arg0 / (arg0 - 0.5)", 0.5, None),
        ("arg0 == arg0", float("nan"), 0),
        ("arg0 > 0 ? arg0 : 1", -1.5, 1.0),
        ("-arg0", 1.5, -1.5),
    ],
)
def test_floating_point_numbers(text: str, found: float, expected: object) -> None:
    assert one(text, {"arg0": found}, site(arguments=[FLOAT])) == expected


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        ("arg0 + arg1", [argument()], "it has 1 argument, so there is no arg1"),
        ("str(arg2)", [argument(), argument()], "it has 2 arguments, so there is no arg2"),
        ("arg0 + 1", [argument(Unavailable("no way to %xmm0"))], "cannot evaluate arg0: no way to %xmm0"),
        ("arg0 + 1", [argument(size=16)], "cannot evaluate arg0: 8@%rdi has 16 bytes and is no number"),
        ("arg0 & 4", [FLOAT], "& takes integers, and an operand is a floating-point number here"),
        ("arg0 % 2", [FLOAT], "% takes integers, and an operand is a floating-point number here"),
        ("arg0 > 1 ? arg0 << 1 : 1", [FLOAT], "<< takes integers, and an operand is a floating-point number here"),
        ("str(arg1, arg0)", [FLOAT, argument()], "the length of str(arg1, …) is a floating-point number here"),
        ("buf(arg1, 4)", [argument()], "it has 1 argument, so there is no arg1"),
        ("arg0 * 2", [FLOAT], None),
    ],
)
def test_why_not(text: str, arguments: list[Argument], reason: str | None) -> None:
    assert why_not_at(value(text), tuple(arguments)) == reason


def test_needs_are_told_once_each() -> None:
    parsed = value(
        'str(arg1, arg0) == str(arg1, 4) || arg0 + uid == 1 || container ~ "*" && pid == cpu || buf(arg1, 4) == "SELE"'
    )
    assert needs(parsed) == (
        Capture(1, is_string=True), Capture(0), Capture(1, is_string=True, max_bytes=4), Capture(BuiltIn.UID),
        Capture(BuiltIn.CONTAINER), Capture(1, is_buffer=True, max_bytes=4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("buf(arg1, 2)", "bytes"),
        ("arg0 ? buf(arg1, 2) : buf(arg3, 1)", "bytes"),
        ("str(arg1, 2)", "string"),
        ("buf(arg1, 2) == 'ab'", "signed"),
    ],
)
def test_bytes_are_told_from_text(text: str, layout: str) -> None:
    parsed = value(text)
    assert evaluate(parsed, events_of(SITE, [], needs(parsed))).layout == layout


def test_value_that_is_no_expression_names_its_field() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^by: unexpected end") as raised:
        parse_value("arg0 +", find_cgroup, "by")
    assert raised.value.column == 6
