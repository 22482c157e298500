from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.cli.render import Clock, abbreviate, fold, format_value, quote
from stapsdtd.runtime.text import escape


@given(st.text())
def test_what_is_escaped_is_printable(text: str) -> None:
    assert escape(text).isprintable()


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S"])))
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eevil", r"\u202eevil"),
        ("\U000e0041", r"\U000e0041"),
        ("[bold]é 日本[/bold]", "[bold]é 日本[/bold]"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_a_string_cannot_close_its_quotation_marks() -> None:
    assert quote('x", 42') == r'"x\", 42"'


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("SELECT 1", '"SELECT 1"'),
        (42, "42"),
        (-1, "-1"),
        (2**64 - 1, "18446744073709551615"),
        (0x5555_5555_4000, "93824992231424"),
        (1.5, "1.5"),
        (b'\xa0\x00a"', r'"\xa0\x00a\""'),
        (b"\x7fELF\n ~\x80", r'"\x7fELF\x0a ~\x80"'),
        (None, "<page not resident>"),
    ],
)
def test_show_value(value: float | str | bytes | None, shown: str) -> None:
    assert format_value(value, "page not resident") == shown


def test_address_is_hexadecimal_however_small() -> None:
    assert [format_value(value, is_hexadecimal=True) for value in (0, 0x2A, 2**64 - 1)] == [
        "0x0",
        "0x2a",
        "0xffffffffffffffff",
    ]


def test_fold_breaks_between_words() -> None:
    assert fold("stapsdt: refused: no room in /a/very/long/path", 22) == [
        "stapsdt: refused: no",
        "    room in",
        "    /a/very/long/path",
    ]


def test_show_some() -> None:
    assert abbreviate(["a", "b"], 2) == "a, b"
    assert abbreviate(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_clock_keeps_microseconds() -> None:
    clock = Clock()
    assert clock.format(1_000_000_123_000)[-9:] == ":40.000123"[1:]
    assert clock.format(1_000_999_999_999)[-9:] == "40.999999"
