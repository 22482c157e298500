from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.arch.expressions import RELOCATED, Expression, parse_expression, parse_memory, parse_value
from stapsdtd.model import Address, Constant, Memory, Operand, Unavailable

IN_THE_GOT = Unavailable("the address of the global offset table is unknown")
TOO_FAR = Unavailable("the displacement does not fit in 32 bits")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5", Expression(5, None)),
        ("+5", Expression(5, None)),
        ("-9", Expression(-9, None)),
        ("0x1F", Expression(31, None)),
        ("-0X10", Expression(-16, None)),
        ("010", Expression(8, None)),
        ("08", Expression(8, None)),
        ("8+4-2", Expression(10, None)),
        ("18446744073709551615", Expression(2**64 - 1, None)),
        ("counter", Expression(0, "counter")),
        ("+counter", Expression(0, "counter")),
        ("table+24", Expression(24, "table")),
        ("52+table-4", Expression(48, "table")),
        ("seq.6", Expression(0, "seq.6")),
        (".hidden", Expression(0, ".hidden")),
        ("_Z3addii$part", Expression(0, "_Z3addii$part")),
        ("hidden@GOTOFF", IN_THE_GOT),
        ("12+hidden@GOTOFF", IN_THE_GOT),
        ("counter@GOTPCREL", IN_THE_GOT),
        ("mine@ntpoff", RELOCATED),
        (".LC1@toc@l", RELOCATED),
        ("last-first", RELOCATED),
        ("4-table", RELOCATED),
        ("one+other", RELOCATED),
        (".LC0", Unavailable(".LC0 is a local label, which is in no symbol table")),
        (".LANCHOR0+4", Unavailable(".LANCHOR0 is a local label, which is in no symbol table")),
    ],
)
def test_numbers_and_symbols(text: str, wanted: Expression | Unavailable) -> None:
    assert parse_expression(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "+", "-", "--5", "5+", "5 + 4", "1b", "0x", "0xg", ".", "@", "$5", "@plt", "9" * 21, "٣", "a*2", "(5)", "a\n"],
)
def test_what_is_no_expression(text: str) -> None:
    assert parse_expression(text) is None


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("-9", Constant(-9)),
        ("18446744073709551615", Constant(2**64 - 1)),
        ("table+24", Address(None, 24, "table")),
        ("table-2147483648", Address(None, -(2**31), "table")),
        ("table+2147483648", TOO_FAR),
        ("counter@GOTENT", IN_THE_GOT),
        ("1.5e+0", Unavailable("floating-point constants are not supported")),
        ("-1.0", Unavailable("floating-point constants are not supported")),
        ("1.5e", None),
        ("", None),
    ],
)
def test_values(text: str, operand: Operand | None) -> None:
    assert parse_value(text) == operand


@pytest.mark.parametrize(
    ("text", "word_bytes", "operand"),
    [
        ("", 8, Memory("base")),
        ("-8", 8, Memory("base", -8)),
        ("0xfffffffffffffff8", 8, Memory("base", -8)),
        ("0xfffffff8", 8, TOO_FAR),
        ("0xfffffff8", 4, Memory("base", -8)),
        ("2147483647", 8, Memory("base", 2**31 - 1)),
        ("2147483648", 8, TOO_FAR),
        ("-2147483648", 8, Memory("base", -(2**31))),
        ("-2147483649", 8, TOO_FAR),
        ("table+4", 8, Memory("base", 4, symbol="table")),
        ("table@toc@l", 8, RELOCATED),
        ("(", 8, None),
    ],
)
def test_memory(text: str, word_bytes: int, operand: Operand | None) -> None:
    assert parse_memory(text, "base", word_bytes=word_bytes) == operand


def test_memory_at_an_index() -> None:
    assert parse_memory("4", "base", "index", 8) == Memory("base", 4, "index", 8)


@given(st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=9), st.booleans())
def test_sums_are_added_up(terms: list[int], is_hexadecimal: bool) -> None:
    shown = "".join(f"{term:+#x}" if is_hexadecimal else f"{term:+d}" for term in terms)
    assert parse_expression(shown) == Expression(sum(terms), None)
