from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import MAX_SELECTOR_LENGTH, Selector, missing_argument, parse
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.model import MAX_STRING_BYTES, Capture, Site, SiteCapture
from stapsdtd.runtime.fair_thread import finish
from tests.unit.samples import argument, captured, site

PATH = "/usr/lib/postgresql/15/bin/postgres"
QUERY_START = site("query__start", provider="postgresql", function="exec_simple_query", arguments=[argument()] * 2)


def choose(
    selectors: tuple[Selector, ...], path: str, sites: tuple[Site, ...]
) -> list[tuple[SiteCapture, frozenset[int] | None]]:
    """Return what to capture at the chosen sites, and for which processes."""
    chooser = SelectorSet(selectors)
    (meant,) = finish(chooser.meant([(path, {each.provider for each in sites})]))
    chosen = finish(chooser.choose(meant, sites))
    return [(chooser.captured(each), chooser.pids(each)) for each in chosen]


def matches(text: str, where: Site = QUERY_START, path: str = PATH) -> bool:
    return bool(choose((parse(text),), path, (where,)))


@pytest.mark.parametrize(
    "text",
    [
        "postgresql:query__start",
        "postgresql:query-start",
        "postgresql:*",
        "*:query*",
        ":",
        "postgresql:",
        ":::",
        "post?resql:query__[rst]*",
        "postgresql:postgres:exec_simple_query:query-start",
        "postgresql::exec_*:",
        "postgresql:/usr/lib/*:*:query__start",
        "postgresql4711:::query-start",
        # DTrace's parts, counted from the right
        "query__start",
        "query-*",
        "postgres:exec_simple_query:query-start",
        "::query__start",
        "/usr/lib/*:exec_*:*",
    ],
)
def test_matches(text: str) -> None:
    assert matches(text)


@pytest.mark.parametrize(
    "text",
    [
        "postgres:query__start",
        "postgresql:query",
        "postgresql:query_start",
        "PostgreSQL:query__start",
        "postgresql:bin/postgres::",
        "postgresql:/usr/lib/:*:query__start",
        "postgresql::main:",
        "postgresql:lib*::",
        "mysql4711:::",
        "postgresql4711:query-start",  # the pid suffix belongs to the long form
        "postgresql",
        "postgresql:exec_simple_query:query__start",
        "exec_simple_query:query__start",
    ],
)
def test_does_not_match(text: str) -> None:
    assert not matches(text)


@pytest.mark.parametrize(
    ("text", "provider", "name", "is_match"),
    [
        ("test-prov1234:::zero-probe", "test__prov", "zero__probe", True),
        ("test-prov:zero-probe", "test__prov", "zero__probe", True),
        ("test__prov:zero__probe", "test-prov", "zero-probe", True),
        ("app:query__[r-t]x", "app", "query__sx", True),
        ("app:query-[!a-c]x", "app", "query__sx", True),
        ("app:query-[!a-c]x", "app", "query__bx", False),
        ("app:query__[]-_]x", "app", "query__]x", True),
        # a bracket that is not closed is itself
        ("app:query[-x", "app", "query[__x", True),
        ("[a-c]pp:x", "bpp", "x", True),
    ],
)
def test_hyphen_is_two_underscores_but_in_a_set(text: str, provider: str, name: str, *, is_match: bool) -> None:
    assert matches(text, site(name, provider=provider)) == is_match


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("app:memfd:libstapsdt:X::start", "/memfd:libstapsdt:X"),
        ("app:memfd*:X*::start", "/memfd:libstapsdt:X"),
        ("app:a:b::start", "/usr/lib/a:b"),
        ("app:/usr/lib/a:b::start", "/usr/lib/a:b"),
    ],
)
def test_further_colons_belong_to_the_module(text: str, path: str) -> None:
    assert matches(text, site("start", provider="app"), path)
    assert not matches(text, site("start", provider="app"), "/usr/lib/a")


def test_site_without_a_function_matches_only_any_function() -> None:
    nowhere = site("query__start", provider="postgresql", function=None)
    assert matches("postgresql:::", nowhere)
    assert not matches("postgresql::main:", nowhere)
    assert not matches("postgresql::?*:", nowhere)


@pytest.mark.parametrize(
    ("provider", "text", "pid"),
    [
        ("postgresql", "postgresql4711:::", 4711),
        ("libpq5", "libpq5:::", None),  # a provider that ends in a digit is itself first of all
        ("libpq5", "libpq54711:::", None),
        ("postgresql", "*4711:::", 4711),
    ],
)
def test_pid_suffix(provider: str, text: str, pid: int | None) -> None:
    found = [pids for _, pids in choose((parse(text),), PATH, (site(provider=provider),))]
    if provider == "libpq5" and text == "libpq54711:::":
        assert not found  # where the number begins cannot be told
    else:
        assert found == [None if pid is None else {pid}]


@pytest.mark.parametrize(
    ("text", "captures"),
    [
        ("a:b", None),
        ("a:b()", ()),
        ("a:b( )", ()),
        ("a:b(arg0)", (Capture(0),)),
        ("a:b(arg0:int)", (Capture(0),)),
        ("a:b(arg0:hex)", (Capture(0, is_hex=True),)),
        ("a:b(arg0:str)", (Capture(0, is_string=True),)),
        ("a:b(arg12:str[256],arg0)", (Capture(12, is_string=True, max_bytes=256), Capture(0))),
        ("a:b ( arg0 : str [ 7 ] , arg0 )", (Capture(0, is_string=True, max_bytes=7), Capture(0))),
        (
            "a:b(arg0:buf[16], arg1 : buf [ 8 ])",
            (Capture(0, is_buffer=True, max_bytes=16), Capture(1, is_buffer=True, max_bytes=8)),
        ),
        (f"a:::b(arg0:str[{MAX_STRING_BYTES}])", (Capture(0, is_string=True, max_bytes=MAX_STRING_BYTES),)),
    ],
)
def test_captures(text: str, captures: tuple[Capture, ...] | None) -> None:
    parsed = parse(text).captures
    assert parsed == captures
    # which is no part of what is compared
    assert [capture.is_hex for capture in parsed or ()] == [capture.is_hex for capture in captures or ()]


@pytest.mark.parametrize(
    ("text", "reason", "column"),
    [
        ("", "a selector names no probe", 0),
        ("(arg0)", "a selector names no probe", 0),
        ("a:b(arg0", "lacks a closing parenthesis", 8),
        ("a:b(arg0) c", "has text after its capture list", 9),
        ("a:b(argv)", "'argv' is not a capture", 4),
        ("a:b(arg0,)", "'' is not a capture", 9),
        ("a:b(arg0,arg1:float)", "'arg1:float' is not a capture", 9),
        ("a:b(arg0,  argv)", "'argv' is not a capture", 11),
        ("a:b(arg0:int[4])", "only str and buf take a length", 4),
        ("a:b(arg0:str[0])", "1 to 4096", 4),
        ("a:b(arg0:str[4097])", "1 to 4096", 4),
        ("a:b(arg0:buf)", "buf needs a length, as in arg0:buf", 4),
        ("a:b(arg0:buf[4097])", "1 to 4096", 4),
    ],
)
def test_what_is_no_selector(text: str, reason: str, column: int) -> None:
    with pytest.raises(InvalidArgumentError, match=reason.replace("(", r"\(")) as raised:
        parse(text)
    assert (raised.value.field, raised.value.column) == ("selectors", column)


def test_length_is_bounded() -> None:
    parse("a:" + "b" * (MAX_SELECTOR_LENGTH - 2))
    with pytest.raises(InvalidArgumentError, match="limited to 1024"):
        parse("a:" + "b" * (MAX_SELECTOR_LENGTH - 1))


@given(st.text(st.characters(codec="utf-8") | st.sampled_from(":()[]*?!-_arg0123str,&|~^\n"), max_size=60))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    """Warnings count: what fnmatch makes of a glob must be a regular expression without doubt."""
    with suppress(InvalidArgumentError):
        choose((parse(text),), PATH, (QUERY_START,))


def test_hostile_glob_takes_no_time() -> None:
    assert not matches("a:" + "*a" * 500 + "b", site("a" * 4000, provider="a"))


def test_hostile_name_takes_no_time() -> None:
    """A file may have 100,000 such sites, and a set of a glob is looked for in globs alone."""
    hostile = site("[" * 100_000 + "x", provider="a")
    assert matches("a:*", hostile)
    assert not matches("a:query-[a-z]", hostile)


def test_first_matching_selector_says_what_to_capture() -> None:
    selectors = parse("postgresql:*(arg1)"), parse("*:query__start")
    other = site("done", provider="other", offset=1)
    assert choose(selectors, PATH, (QUERY_START, other)) == [(captured(QUERY_START, Capture(1)), None)]
    assert choose(selectors[::-1], PATH, (QUERY_START,)) == [(captured(QUERY_START), None)]


def test_processes_of_several_selectors_are_joined() -> None:
    first, second, everybody = map(parse, ("postgresql7:::", "postgresql8:::", "postgresql:*"))
    assert [pids for _, pids in choose((first, second), PATH, (QUERY_START,))] == [frozenset({7, 8})]
    assert [pids for _, pids in choose((first, everybody), PATH, (QUERY_START,))] == [None]


def test_capture_beyond_the_arguments() -> None:
    assert missing_argument(captured(QUERY_START, Capture(1), Capture(2), Capture(3))) == (
        "it has 2 arguments, so there is no arg2"
    )
    assert missing_argument(captured(QUERY_START)) is None


def test_captures_of_a_glob_leave_out_what_a_site_lacks() -> None:
    wanted = "(arg3, arg1:str)"
    kept = captured(QUERY_START, Capture(1, is_string=True))
    for text in ("postgresql:*", "*:query__start", "query__start", "post*:::query__start"):
        assert choose((parse(text + wanted),), PATH, (QUERY_START,)) == [(kept, None)]
    for text in ("postgresql:query__start", "postgresql:*:*:query__start"):
        ((selected, _),) = choose((parse(text + wanted),), PATH, (QUERY_START,))
        assert missing_argument(selected) == "it has 2 arguments, so there is no arg3"
