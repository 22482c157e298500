from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selector_text import (
    Part,
    as_part,
    captures_in,
    exact_selector,
    head_of,
    parts_of,
    probe_name,
    quoted,
)
from stapsdtd.catalog.selectors import MAX_SELECTOR_LENGTH, Selector, parse
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.runtime.fair_thread import finish
from tests.unit.samples import site

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from("""\\":()[]*?!-_ \n\t'x1"""), max_size=20)
NAMES = TEXTS.filter(bool)
NO_PATH = "/no/such/file"


def chooses(text: str, provider: str, path: str, function: str, name: str) -> bool:
    """Report whether a selector matches a site, and check that it says so of itself."""
    selector = parse(text)
    where = site(name, provider=provider, function=function or None)
    chooser = SelectorSet([selector])
    (meant,) = finish(chooser.meant([(path, [provider])]))
    chosen = bool(finish(chooser.choose(meant, [where])))
    assert chosen == matches(selector, provider, path, function, name)
    assert not chosen or chooser.may_mean([provider])
    (naming,) = finish(chooser.naming([(path, ((provider, name),))]))
    assert not chosen or naming
    return chosen


def matches(selector: Selector, provider: str, path: str, function: str, name: str) -> bool:
    named = selector.matches_provider(provider) and selector.matches_name(name) and selector.matches_module(path)
    return named and selector.function.matches(function)


@pytest.mark.parametrize(
    ("text", "parts", "captures"),
    [
        ('paren:"a(b)"', ["paren", "a(b)"], None),
        ('paren:"a(b)"(arg0)', ["paren", "a(b)"], "arg0"),
        ("paren:a(b)", ["paren", "a"], "b"),
        ('ts:"&HttpSM::state_read"', ["ts", "&HttpSM::state_read"], None),
        ('"a":"b":"c":"d"()', ["a", "b", "c", "d"], ""),
        ('""', [""], None),
        (r'"\"\\\n\t\r\x1b\xe9\u20ac\U0001f600"', ['"\\\n\t\r\x1bé€\U0001f600'], None),
        # elsewhere than first, a quote is a character, and a backslash always is one outside of quotes
        ("quote\"s:x'y", ['quote"s', "x'y"], None),
        (r"a\n:b", [r"a\n", "b"], None),
    ],
)
def test_parts(text: str, parts: list[str], captures: str | None) -> None:
    found, end = parts_of(text, "selectors")
    assert [part.text for part in found] == parts
    assert head_of(text) == text[:end]
    assert captures_in(text) == captures


def test_parts_have_their_columns() -> None:
    found, end = parts_of('a:"b:c"::d(arg0)', "selectors")
    assert found == [Part("a", 0), Part("b:c", 2, is_quoted=True), Part("", 8), Part("d", 9)]
    assert end == 10


@pytest.mark.parametrize(
    ("text", "reason", "column"),
    [
        ('a:"b', "the quote is not closed", 2),
        ('"', "the quote is not closed", 0),
        ('a:"b\\"', "the quote is not closed", 2),
        ('a:"b"c', "a colon, a parenthesis or the end is expected after a closing quote", 5),
        ('a:"b" (arg0)', "is expected after a closing quote", 5),
        (r'a:"b\q"', r"\q is no escape", 4),
        (r'a:"\x4"', r"\x is no escape", 3),
        (r'a:"\ud800"', r"\ud800 is no character", 3),
        (r'a:"\U00110000"', r"\U00110000 is no character", 3),
        ('a:"b":c::d', "quotes go around all of the module", 2),
        ('a:"b"(argv)', "'argv' is not a capture", 6),
    ],
)
def test_malformed_quotes_are_shown(text: str, reason: str, column: int) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse(text)
    assert reason in raised.value.reason
    assert (raised.value.field, raised.value.column, raised.value.text) == ("selectors", column, text)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("paren:a(b)", 'paren:"a(b)"'),
        ("ns:std::vector::push_back(int const&) const", 'ns:"std::vector::push_back(int const&) const"'),
        ("a(b)", '"a(b)"'),
    ],
)
def test_name_with_a_parenthesis_is_told_from_captures(text: str, written: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse(text)
    assert raised.value.reason.endswith(f"; if the name has the parenthesis, write {written}")
    parse(written)


@given(NAMES, TEXTS, TEXTS, NAMES)
def test_any_text_in_quotes_matches_itself(provider: str, module: str, function: str, name: str) -> None:
    path = f"/lib/{module}"
    exact = f"{quoted(provider)}:{quoted(path)}:{quoted(function)}:{quoted(name)}"
    for text in (exact, exact_selector(provider, path, name), f"{quoted(provider)}:{quoted(name)}", quoted(name)):
        assert text.isprintable()
        assert not parse(text).is_glob or text == quoted(name)
        assert chooses(text, provider, path, function, name)


@given(st.tuples(NAMES, TEXTS, TEXTS, NAMES), st.tuples(NAMES, TEXTS, TEXTS, NAMES))
def test_quotes_match_nothing_else(one: tuple[str, str, str, str], other: tuple[str, str, str, str]) -> None:
    text = ":".join(map(quoted, (one[0], f"/{one[1]}", *one[2:])))
    assert chooses(text, other[0], f"/{other[1]}", *other[2:]) == (one == other)


@given(TEXTS.filter(lambda text: "/" not in text))
def test_module_in_quotes_is_the_files_name(name: str) -> None:
    text = f"app:{quoted(name)}::tick"
    assert chooses(text, "app", f"/lib/{name}", "", "tick")
    assert not chooses(text, "app", f"/lib/{name}x", "", "tick")


@given(NAMES, NAMES)
def test_names_are_printed_as_selectors_of_them(provider: str, name: str) -> None:
    text = probe_name(provider, name)
    assert text.isprintable()
    assert chooses(text, provider, NO_PATH, "", name)
    assert not parse(text).is_glob
    assert captures_in(text) is None


@given(st.text('"\\:(ab*1', max_size=12))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    with suppress(InvalidArgumentError):
        selector = parse(text)
        parts, _ = parts_of(text, "selectors")
        # what it was parsed to is written in the same way
        again = ":".join(quoted(part.text) if part.is_quoted else part.text for part in parts)
        assert parse(again).name.text == selector.name.text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("query__start", "query__start"),
        ("query-start", "query-start"),
        ("c d", "c d"),
        ("événement", "événement"),
        ("x'y", "x'y"),
        ("a.b/c@d", "a.b/c@d"),
        ("a(b)", '"a(b)"'),
        ("a::b", '"a::b"'),
        ("na[me]?", '"na[me]?"'),
        (" a", '" a"'),
        ("a ", '"a "'),
        ('"a', r'"\"a"'),
        ("\x1b[31mred", r'"\x1b[31mred"'),
        ("a\nb", r'"a\nb"'),
        (r"bad\xff(", r'"bad\\xff("'),
        ("", '""'),
    ],
)
def test_quotes_are_printed_where_they_are_needed(text: str, part: str) -> None:
    assert as_part(text) == part


def test_quotes_take_texts_as_they_are() -> None:
    # neither hyphens nor cases nor globs
    assert not chooses('"a-b":x', "a__b", NO_PATH, "", "x")
    assert not chooses('"a__b":x', "a-b", NO_PATH, "", "x")
    assert not chooses('"A":x', "a", NO_PATH, "", "x")
    assert not chooses('"a*":x', "ab", NO_PATH, "", "x")
    assert chooses('"a-b":x-y', "a-b", NO_PATH, "", "x__y")
    # nor the number of a process
    assert parse('"nodejs1234":::x').provider_of_pid is None
    assert parse("nodejs1234:::x").provider_of_pid is not None
    # an empty part in quotes is no part of anything
    assert chooses('a::"":x', "a", NO_PATH, "", "x")
    assert not chooses('a::"":x', "a", NO_PATH, "main", "x")
    assert parse('"*"').is_any is False


def test_quotes_do_not_count_towards_the_length() -> None:
    long = "n" * 4 * MAX_SELECTOR_LENGTH
    assert chooses(quoted(long), "a", NO_PATH, "", long)
    with pytest.raises(InvalidArgumentError, match="1024 characters apart from parts in quotes"):
        parse(f"{quoted(long)}:{long}")
