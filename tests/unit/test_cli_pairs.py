"""What `stapsdt latency` and `stapsdt spans` make of their arguments, and of what became of starts."""

from __future__ import annotations

import re

import click
import pytest

from stapsdtd.cli.known_signatures import Known
from stapsdtd.cli.named_filter import key_by_position
from stapsdtd.cli.pairs import Pair, key_of_start
from stapsdtd.cli.trace_output import format_spans, why_unpaired
from stapsdtd.client import SpanAccount


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("postgresql:query__start", "postgresql:query__done"),
        ("postgresql:query-start(query)", "postgresql:query__done"),
        ("postgresql4711:::query-start", "postgresql4711:::query__done"),
        ("python:gc__start", "python:gc__done"),
        ("fbt::tcp_sendmsg:entry", "fbt::tcp_sendmsg:return"),
        ("fbt:nf_conntrack:nf_*:entry(arg0)", "fbt:nf_conntrack:nf_*:return"),
    ],
)
def test_ends_that_signatures_know(start: str, end: str) -> None:
    assert Pair(start, "").known_end(Known()).end == end


@pytest.mark.parametrize("start", ["postgresql:query__done", "app:begin", "postgresql:*", "broken("])
def test_ends_that_nobody_knows(start: str) -> None:
    with pytest.raises(click.UsageError, match=re.escape(f"which probe ends {start} is not known")):
        Pair(start, "").known_end(Known())


@pytest.mark.parametrize(
    ("start", "entry"),
    [
        ("kprobe:tcp_sendmsg", "fbt::tcp_sendmsg:entry"),
        ("kfunc:nf_conntrack:nf_ct_get", "fbt:nf_conntrack:nf_ct_get:entry"),
        ("fentry:vmlinux:vfs_*", "fbt:vmlinux:vfs_*:entry"),
        ("fbt::tcp_sendmsg", "fbt::tcp_sendmsg:entry"),
        ("fbt:tcp_sendmsg:entry", "fbt::tcp_sendmsg:entry"),
    ],
)
def test_functions_that_are_named_as_elsewhere(start: str, entry: str) -> None:
    with pytest.raises(click.UsageError, match=re.escape(f"not known: write {entry}, whose return ends it")):
        Pair(start, "").known_end(Known())


@pytest.mark.parametrize("start", ['"fbt"::f:entry', "fbt::f:return", "fbt::f:entry:x"])
def test_other_probes_are_no_entries_of_functions(start: str) -> None:
    with pytest.raises(click.UsageError, match="name it after that, as END"):
        Pair(start, "").known_end(Known())


@pytest.mark.parametrize(
    ("pair", "is_latest"),
    [
        (Pair("postgresql:query__start", ""), True),
        (Pair("postgresql:transaction__start", "postgresql:transaction__commit"), True),
        (Pair("postgresql:query__start", "", key=("pid",)), False),
        (Pair("postgresql:query__start", "", nested=True), False),
        (Pair("python:gc__start", ""), False),
        (Pair("app:begin", "app:end"), False),
        (Pair("app:begin", "app:end", latest=True), True),
    ],
)
def test_starts_that_replace_others(pair: Pair, *, is_latest: bool) -> None:
    found = pair.known_end(Known())
    assert found.latest is is_latest
    assert found.made(pair.start, "", pair.key).latest is is_latest


def test_one_way_to_choose_a_start() -> None:
    with pytest.raises(click.UsageError, match="--nested and --latest exclude each other"):
        Pair("app:begin", "app:end", nested=True, latest=True).known_end(Known())


def test_ends_that_are_given_come_first() -> None:
    pair = Pair("postgresql:query__start", "postgresql:query__execute__done")
    assert pair.known_end(Known()).end == pair.end


COMPILATION = [Known().of("hotspot", "method__compile__begin")]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("class_length", "start.arg3"),
        ("arg2:str[64]", "start.arg2:str[64]"),
        ("class:str[8]", "start.arg2:str[8]"),
        ("str(class)", "start.str(arg2)"),
    ],
)
def test_keys_of_starts(key: str, text: str) -> None:
    assert key_of_start(key, key_by_position(key, COMPILATION)) == text


def test_string_of_a_start_whose_length_is_another_argument() -> None:
    reason = r"--by start\.class: its length .* write class, .* start\.arg2:str\[64\]"
    with pytest.raises(click.UsageError, match=reason):
        key_of_start("class", key_by_position("class", COMPILATION))


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        (SpanAccount(starts=3, paired=3), ""),
        (SpanAccount(starts=1, open=1), "1 start: 1 waiting for an end"),
        (
            SpanAccount(starts=5, paired=4, timed_out=1, unmatched=2),
            "5 starts: 4 paired, 1 timed out; 2 ends without a start",
        ),
        (
            SpanAccount(starts=15, paired=1, nested=2, died=3, table_full=9),
            "15 starts: 1 paired, 2 within another, 3 of threads that ended, 9 without room",
        ),
        (SpanAccount(unmatched=1), "1 end without a start"),
    ],
)
def test_what_made_no_pair(spans: SpanAccount, text: str) -> None:
    assert format_spans(spans) == text


def test_starts_that_were_replaced() -> None:
    spans = SpanAccount(starts=3, paired=1, nested=2)
    assert format_spans(spans, is_latest=True) == "3 starts: 1 paired, 2 replaced by a later one"


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        (SpanAccount(starts=2, paired=1, open=1), ""),
        (SpanAccount(unmatched=3), "END fired, but no START before it"),
        (SpanAccount(starts=3, open=3), "START fired, but no END yet"),
        (SpanAccount(starts=3, open=3, unmatched=1), "no END had the key of a START"),
        (SpanAccount(starts=3, timed_out=3, unmatched=3), "every START timed out"),
        (SpanAccount(starts=3, timed_out=2, died=1, unmatched=3), "no END had the key of a START"),
    ],
)
def test_why_there_are_no_pairs(spans: SpanAccount, reason: str) -> None:
    found = why_unpaired(spans)
    assert found.startswith(reason)
    assert bool(found) is bool(reason)
