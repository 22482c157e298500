"""What keys and values come to that are expressions, against what Python says of each event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.aggregate.aggregation import Aggregation, Function, HitField, Key, KeySource
from stapsdtd.aggregate.buckets import POWERS_OF_TWO
from stapsdtd.events.batch import EventBatch, join
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.model import BuiltIn, Capture, Site
from stapsdtd.query.expression import Expression
from stapsdtd.query.parse import parse_number, parse_value
from stapsdtd.query.sources import ExpressionSource, key_source, value_source
from stapsdtd.query.text import text_of
from stapsdtd.sessions.aggregator import Aggregator
from stapsdtd.sessions.site_ids import KnownSite
from tests.fuzz.examples import examples
from tests.unit.expressions import SITE, Row, Scalar, conditions, numbers, result, strings
from tests.unit.samples import argument, batch, captured, sample_object, signed, site
from tests.unit.test_query_evaluate import drawn_rows, events_of, find_cgroup

ROOM = 1 << 30
OTHER = site("tock", 0x2000, SITE.arguments)
SITES = {1: SITE, 2: OTHER}
KEY_BYTES = 64


def key(text: str) -> KeySource | ExpressionSource:
    return key_source(parse_value(text, find_cgroup), KEY_BYTES)


def value(text: str) -> Capture | ExpressionSource:
    return value_source(parse_number(text, find_cgroup))


def adding(aggregation: Aggregation, *sites: Site) -> Aggregator:
    """Of sites whose ids count from 1."""
    known = {
        number: KnownSite(sample_object(each, path="/usr/bin/app"), captured(each, *aggregation.captures), why_not)
        for number, each in enumerate(sites, 1)
    }

    def known_sites(site_ids: Iterable[int]) -> dict[int, KnownSite]:
        return {site_id: known[site_id] for site_id in site_ids if site_id in known}

    return Aggregator(aggregation, known_sites, ROOM)


def why_not(*_: object) -> str | None:
    return None


def at_site(events: EventBatch, site_id: int) -> EventBatch:
    return batch(
        events.time_ns.tolist(), *events.tables[0].columns, site_id=site_id, pid=events.pid.tolist(),
        cpu=events.cpu.tolist(), comm=events.comm.tolist(),
    )  # fmt: skip


def rows_of(data: st.DataObject, captures: Sequence[Capture]) -> list[Row]:
    """What is cut after 64 bytes and what is not are the same here, where texts are short."""
    rows = drawn_rows(data, captures)
    for row in rows:
        values = cast("dict[Capture, object]", row.values)
        for capture in captures:
            if capture.max_bytes == KEY_BYTES:
                values[replace(capture, max_bytes=None)] = values[capture]
    return rows


@examples(100)
@given(st.lists(numbers() | strings() | conditions(), min_size=1, max_size=3), numbers() | conditions(), st.data())
def test_rows_are_those_of_the_events_one_by_one(
    keys: list[Expression], of_value: Expression, data: st.DataObject
) -> None:
    aggregation = Aggregation(
        (Function.COUNT, Function.SUM, Function.HISTOGRAM),
        tuple(key(text_of(each)) for each in keys),
        value(text_of(of_value)),
        POWERS_OF_TWO,
    )
    hits = {site_id: rows_of(data, aggregation.captures) for site_id in SITES}
    expected: dict[Key, list[Scalar | None]] = defaultdict(list)
    for site_id, rows in hits.items():
        at = SITES[site_id]
        for row in rows:
            expected[tuple(result(each, at, row) for each in keys)].append(result(of_value, at, row))
    aggregator = adding(aggregation, *SITES.values())
    events = [
        at_site(events_of(SITES[site_id], rows, aggregation.captures).batch, site_id)
        for site_id, rows in hits.items()
    ]  # fmt: skip
    assert aggregator.add(join(events)) == 0
    found = aggregator.table.take(1).rows
    assert found.keys() == expected.keys()
    for of_key, row_ in found.items():
        values = [int(each) for each in expected[of_key] if each is not None]
        assert (row_.count, row_.values, row_.total) == (len(expected[of_key]), len(values), sum(values))
        assert (row_.low, row_.high) == (min(values, default=None), max(values, default=None))
        assert sum(row_.buckets.values()) == len(values)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("arg0", Capture(0)),
        ("(arg1)", Capture(1)),
        ("str(arg0)", Capture(0, is_string=True)),
        ("str(arg0, 16)", Capture(0, is_string=True, max_bytes=16)),
        ("uid", Capture(BuiltIn.UID)),
        ("container", Capture(BuiltIn.CONTAINER)),
        ("pid", HitField.PID),
        ("comm", HitField.EXECNAME),
        ("name", HitField.NAME),
    ],
)
def test_what_an_engine_knows_is_no_expression(text: str, source: KeySource) -> None:
    assert key(text) == source


@pytest.mark.parametrize(
    ("text", "captures"),
    [
        ("str(arg1, arg2)", (Capture(1, is_string=True), Capture(2))),
        ("timestamp / 1000", ()),
        ("arg0 > pid", (Capture(0),)),
        # what is the key is cut, and not what it is compared with
        (
            'str(arg0) == "x" ? str(arg0) : (arg1 ? str(arg1, 4) : "none")',
            (
                Capture(0, is_string=True), Capture(0, is_string=True, max_bytes=KEY_BYTES), Capture(1),
                Capture(1, is_string=True, max_bytes=4),
            ),
        ),
    ],
)  # fmt: skip
def test_what_an_expression_needs_is_captured(text: str, captures: tuple[Capture, ...]) -> None:
    aggregation = Aggregation((Function.COUNT,), (key(text),))
    assert len(aggregation.computed) == 1
    assert aggregation.captures == captures


def test_a_value_can_be_a_field() -> None:
    assert value("arg0") == Capture(0)
    assert value("uid") == Capture(BuiltIn.UID)
    assert isinstance(value("pid"), ExpressionSource)


def test_expressions_that_differ_in_the_type_of_a_number_are_two_keys() -> None:
    aggregation = Aggregation((Function.COUNT,), (key("arg0 / 2"), key("arg0 / 2.0"), key("arg0 / 2")))
    assert [each.text for each in aggregation.computed] == ["arg0 / 2", "arg0 / 2.0"]
    aggregator = adding(aggregation, site(arguments=[argument()]))
    aggregator.add(batch(range(2), signed(3, 4)))
    assert {each: row.count for each, row in aggregator.table.take(1).rows.items()} == {(1, 1.5, 1): 1, (2, 2.0, 2): 1}


def test_a_result_that_is_no_number_is_unavailable() -> None:
    aggregation = Aggregation((Function.MAX,), (key("0.0 * arg0 / (arg0 - 1)"),), value("arg0 / arg0"))
    aggregator = adding(aggregation, site(arguments=[argument()]))
    aggregator.add(batch(range(3), signed(0, 1, 2)))
    rows = aggregator.table.take(1).rows
    assert {each: (row.count, row.high) for each, row in rows.items()} == {(0.0,): (2, 1), (None,): (1, 1)}


def test_a_file_name_that_is_no_text_is_a_key() -> None:
    aggregation = Aggregation((Function.COUNT,), (HitField.MODULE, key('module ~ "app*" ? 1 : 2')))
    where = site()
    known = KnownSite(sample_object(where, path="/usr/bin/app\udcff"), captured(where), why_not)
    aggregator = Aggregator(aggregation, lambda _: {1: known}, ROOM)
    aggregator.add(batch([0]))
    assert list(aggregator.table.take(1).rows) == [(b"app\xff", 1)]


def test_cgroups_are_looked_up() -> None:
    assert find_cgroup("/a") == CgroupInfo(7, 1)
    source = key('cgroup == "/a" ? "in" : "out"')
    assert isinstance(source, ExpressionSource)
    assert source.captures == (Capture(BuiltIn.CGROUP),)
