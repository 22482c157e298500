"""Whatever stands in a note: no architecture's grammar raises, and none takes more than linear time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.arch import ARCHITECTURES, parse_arguments
from stapsdtd.model import Address, Constant, Memory, Operand, Register
from tests.processor import seconds_beyond

PARSERS = {name: each.parse_operand for name, each in ARCHITECTURES.items() if each.parse_operand}

PIECES = st.lists(
    st.sampled_from(
        [
            *("8@", "-4@", "f@", "16@", "@", " ", ", ", ",", "(", ")", "[", "]", "%", "$", "#", ":", "-", "+", "!"),
            *("rax", "eax", "ah", "esp", "x0", "w3", "sp", "r0", "r15", "a0", "s0", "zero", "fp", "lr", "r4", "d0"),
            *("lsl", "sxtw", "asr", "lo12", "lo", "i", "table", ".LC0", ".", "GOTOFF", "toc", "gs"),
            *("0", "3", "9", "0x", "08", "99999999999999999999", "1.5e+0", "\u0663", "\0", "\n"),
        ]
    ),
    max_size=40,
).map("".join)


def fits(operand: Operand) -> bool:
    match operand:
        case Constant(value):
            return -(2**63) <= value < 2**64
        case Register(name, first_bit):
            return bool(name) and first_bit in (0, 8)
        case Memory(base, displacement, index, scale, symbol):
            is_reached = "" not in (base, index, symbol) and (index is not None or scale == 1)
            return is_reached and -(2**31) <= displacement < 2**31 and 1 <= scale <= 2**31
        case Address(base, displacement, symbol):
            return base is None and bool(symbol) and -(2**31) <= displacement < 2**31
        case _:
            return bool(operand.reason)


@pytest.mark.parametrize("architecture", PARSERS)
@given(text=PIECES | st.text(max_size=60))
def test_nothing_raises_and_every_operand_fits(architecture: str, text: str) -> None:
    for argument in parse_arguments(text, architecture):
        assert 0 <= argument.size <= 1 << 20
        assert fits(argument.operand)
    assert PARSERS[architecture](text)[1] in (1, 2, 4, 8)


LONG = 1 << 18
MAX_SECONDS = 1.0

TEXTS = [
    *("(", ")", "[", "]", "[(", "()", "[]", "%", "$", "#", "i", "+", "-", ",", ".", " ", "@", "0", "x0,", "r0, "),
    *("1+", "1+1", "a+", "a@", "a(", "(%eax", "(%eax,", "[x0, ", "lsl ", "[x0, x1, lsl", "#:lo12:", "%lo(", "%gs:"),
    *("0x", "1.5e+", "1 ", "8@", "8@a ", "8@x0", "8@(", "8@[x0, ", "$r4,", "%r3,", "0(", "0,", "x", "v0.", "w", "_"),
]


@pytest.mark.parametrize("architecture", PARSERS)
@pytest.mark.timeout(60)
def test_time_is_linear(architecture: str) -> None:
    """256 KiB of anything, where notes have 4: with backtracking it would take hours."""
    for text in TEXTS:
        for tail in ("", "!"):
            hostile = text * (LONG // len(text)) + tail

            def parse(text: str = text, hostile: str = hostile) -> None:
                PARSERS[architecture](hostile)
                PARSERS[architecture](f"{text[:3]}{hostile}")

            assert not seconds_beyond(MAX_SECONDS, parse), text


@pytest.mark.parametrize("architecture", PARSERS)
@pytest.mark.timeout(20)
def test_hostile_notes_take_no_time(architecture: str) -> None:
    for text in TEXTS:
        for prefix in ("", "8@", "8@[x0, ", "8@0(", "8@$", "8@#", "8@i"):
            parse_arguments(f"{prefix}{text * (4096 // len(text))}!", architecture)
