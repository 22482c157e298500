"""Formats of printf() and printa(): what is refused, and what values become."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.query.d.formats import FormatError, check_printa, check_printf, parse
from stapsdtd.query.d.printing import Printer
from stapsdtd.query.d.values import Bytes, Integer, OwnText, Pointer, String, Type, Value, signed, unsigned
from stapsdtd.runtime.text import escape

CHAR, SHORT, INT, LONG = (Integer(bits, is_signed=True) for bits in (8, 16, 32, 64))
UCHAR, USHORT, UINT, ULONG = (Integer(bits, is_signed=False) for bits in (8, 16, 32, 64))
STRING, POINTER = String(), Pointer()


def printf(text: str, *arguments: tuple[Type, Value]) -> str:
    types = tuple(kind for kind, _ in arguments)
    format_ = parse(text)
    check_printf(format_, types)
    return Printer(format_, types).text([value for _, value in arguments])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the format is empty"),
        ("%s %Z", "conversion #2: there is no %Z"),
        ("%hhd", "conversion #1: there is no %hhd"),
        ("100%", "conversion #1 has no name; a percent sign is written %%"),
        ("%-5l", "conversion #1 has no name"),
        ("%5%", "conversion #1, %5%, must be written %%"),
        ("%1$d", "arguments cannot be numbered"),
        ("%% %k", r"conversion #2 (%k): stacks are not captured yet"),
        ("%5000d", "5000 columns are more than 4096"),
        ("%.99999999999d", "99999999999 columns are more than 4096"),
    ],
)
def test_a_format_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError) as refusal:
        parse(text)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "types", "message"),
    [
        ("%d", [], "printf(): conversion #1 (%d) lacks an argument"),
        ("%s %*d", [STRING, INT], "printf(): conversion #2 (%d) lacks an argument"),
        ("%*d", [], 'printf(): conversion #1 (%d) lacks an argument for its width, "*"'),
        (
            "%.*s",
            [STRING],
            "printf(): argument #2 has the type string; the precision of conversion #1 (%s) takes an integer",
        ),
        ("%d", [STRING], "printf(): argument #2 has the type string; conversion #1 (%d) takes an integer"),
        ("%s", [INT], "argument #2 has the type int; conversion #1 (%s) takes a string; use stringof or copyinstr"),
        ("%d", [POINTER], "argument #2 has the type void *; conversion #1 (%d) takes an integer"),
        ("%c", [LONG], "argument #2 has the type long long; conversion #1 (%c) takes a char, short or int"),
        ("%Y", [INT], "conversion #1 (%Y) takes nanoseconds of 64 bits"),
        ("%f", [INT], "conversion #1 (%f) takes a floating-point number, which D programs do not have"),
        ("%hd", [USHORT], "argument #2 has the type unsigned short; conversion #1 (%hd) takes the type short"),
        ("%ld", [INT], "argument #2 has the type int; conversion #1 (%ld) takes the type long long"),
        ("%d", [INT, INT], "printf(): the format takes only 1 argument, and there are 2"),
        ("hello", [INT], "printf(): the format takes only 0 arguments, and there are 1"),
        ("%@d", [], "printf(): conversion #1 (%d) takes an aggregation (%@), which printa() prints"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(text: str, types: list[Type], message: str) -> None:
    format_ = parse(text)
    with pytest.raises(FormatError) as refusal:
        check_printf(format_, types)
    assert message in str(refusal.value)


def test_printa_takes_a_part_of_the_key_and_only_numbers_as_results() -> None:
    check_printa(parse("%@d %s"), [STRING, INT])
    with pytest.raises(FormatError, match=r"printa\(\): conversion #2 \(%s\) lacks an argument"):
        check_printa(parse("%s %s"), [STRING])
    with pytest.raises(
        FormatError, match=r"an aggregation's result has the type long long; conversion #1 \(%s\) takes a st"
    ):
        check_printa(parse("%@s"), [])


def test_a_conversion_knows_its_argument() -> None:
    assert printf("%d %d", (UCHAR, 200), (CHAR, -56)) == "200 -56"
    assert printf("%d %u %x", (ULONG, 2**64 - 1), (INT, -1), (SHORT, -1)) == f"{2**64 - 1} {2**32 - 1} ffff"
    assert printf("%hd %hu %lx %llX", (SHORT, -3), (USHORT, 7), (ULONG, 255), (LONG, 255)) == "-3 7 ff FF"
    assert printf("0x%p|%?p|%a", (POINTER, 0xBEEF), (POINTER, 0xBEEF), (POINTER, 0xBEEF)) == (
        "0xbeef|            beef|0xbeef"
    )
    assert printf("%c%c%lc", (INT, 65), (CHAR, 66), (INT, 67)) == "ABC"


def test_text_around_conversions_is_as_it_is() -> None:
    assert printf("100%% of %d%%, {ptr}\n", (INT, 5)) == "100% of 5%, {ptr}\n"
    assert printf("no conversion") == "no conversion"
    assert printf("%s%s", (STRING, "%d"), (STRING, "!")) == "%d!"


def test_strings_end_at_nul_and_escape_what_is_not_printable() -> None:
    assert printf("<%s>", (Bytes(), b"ab\0c")) == "<ab>"
    assert printf("%S", (STRING, 'say "hi"\t\x1b[2J\\ é')) == r"say \"hi\"\t\033[2J\\ \303\251"
    assert printf("%C%C%C", (INT, 10), (INT, 65), (CHAR, 0)) == r"\nA\0"


def test_widths_come_from_arguments_with_bounds() -> None:
    assert printf("<%*d> <%-*d>", (INT, 4), (INT, 1), (INT, 4), (INT, 2)) == "<   1> <2   >"
    assert printf("<%*d> <%.*s>", (INT, -4), (INT, 1), (INT, 2), (STRING, "hello")) == "<1   > <he>"
    assert printf("<%.*s> <%.0s>", (LONG, -1), (STRING, "all"), (STRING, "all")) == "<all> <all>"
    assert len(printf("%*d", (LONG, 2**31 - 1), (INT, 1))) == 4096


def test_times_are_local_and_in_english(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2024-01-31 11:34:56 UTC
    now = 1706700896_123456789
    monkeypatch.setenv("TZ", "CET-1")
    ctypes.CDLL(None).tzset()
    try:
        assert printf("%Y|%24Y", (LONG, now), (ULONG, now)) == "2024 Jan 31 12:34:56|    2024 Jan 31 12:34:56"
        assert printf("%Y", (LONG, now + 86400 * 10**9)) == "2024 Feb  1 12:34:56"
        assert printf("%T", (LONG, now)) == "Wed, 31 Jan 2024 12:34:56 CET"
    finally:
        monkeypatch.undo()
        ctypes.CDLL(None).tzset()


def test_results_are_taken_in_order_and_the_last_for_the_rest() -> None:
    printer = Printer(parse("%-4s|%@5d|%@x|%@u\n"), (STRING, LONG))
    assert printer.text(["key", 1], [-7, 255]) == "key |   -7|ff|255\n"
    assert Printer(parse("%@-22Y|"), ()).text([], [0])[-3:] == "  |"
    assert printer.text(["key", 1], ["\n picture\n"]) == "key |\n picture\n|\n picture\n|\n picture\n\n"


@given(
    st.sampled_from("diuxXo"),
    st.builds(Integer, st.sampled_from([8, 16, 32, 64]), st.booleans()),
    st.integers(-(2**63), 2**64 - 1),
    st.text("-+ #0'", max_size=4),
    st.from_regex(r"([1-9][0-9]?)?(\.[1-9][0-9]?)?", fullmatch=True),
)
def test_integers_are_as_cs(name: str, kind: Integer, value: int, flags: str, size: str) -> None:
    value = signed(value, kind.bits) if kind.is_signed else unsigned(value, kind.bits)
    ours = printf(f"<%{flags}{size}{name}>", (kind, value))
    c_name = "u" if name in "di" and not kind.is_signed else name
    c_value = value if c_name in "di" else unsigned(value, kind.bits)
    assert ours == c_printf(f"<%{flags}{size}ll{c_name}>", ctypes.c_longlong(signed(c_value)))


@given(
    st.text(st.characters(codec="ascii", exclude_characters="\0")),
    st.booleans(),
    st.integers(0, 20),
    st.integers(1, 20),
)
def test_strings_are_as_cs(value: str, is_left: bool, width: int, precision: int) -> None:
    for text in (f"%{'-' * is_left}{width or ''}s|", f"%{'-' * is_left}{width or ''}.{precision}s|"):
        assert printf(text, (STRING, OwnText(value))) == c_printf(text, ctypes.c_char_p(value.encode()))


@given(st.text(), st.integers(0, 20))
def test_strings_of_others_are_printable(value: str, width: int) -> None:
    text = printf(f"\t%{width or ''}s\n", (STRING, value))
    assert text == f"\t{escape(value.partition(chr(0))[0]):>{width}}\n"
    assert text[1:-1].isprintable()
    assert printf("%c", (INT, 0x9B)) == r"\x9b"
    assert printf("%.3s|", (STRING, "ab\x1b[2J")) == r"ab\x1b|"


@given(st.text("%-+ #0'@*?.123hlLdusxcYpkZ$\n", max_size=12))
def test_any_text_is_a_format_or_refused(text: str) -> None:
    try:
        format_ = parse(text)
    except FormatError:
        return
    types = (INT,) * len(format_.conversions) * 3
    try:
        check_printf(format_, types)
    except FormatError:
        return
    assert Printer(format_, types).text([1] * len(types))


def c_printf(text: str, value: ctypes.c_longlong | ctypes.c_char_p) -> str:
    buffer = ctypes.create_string_buffer(1 << 12)
    length = ctypes.CDLL(None).snprintf(buffer, len(buffer), text.encode(), value)
    assert 0 <= length < len(buffer)
    return buffer.value.decode()
