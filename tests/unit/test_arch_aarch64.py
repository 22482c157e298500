from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.aarch64 import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable


@pytest.mark.parametrize("number", range(31))
def test_registers_of_both_widths(number: int) -> None:
    assert parse_operand(f"x{number}") == (Register(f"x{number}"), 8)
    assert parse_operand(f"w{number}") == (Register(f"x{number}"), 4)


@pytest.mark.parametrize(
    ("alias", "full", "width"),
    [("sp", "sp", 8), ("wsp", "sp", 4), ("lr", "x30", 8), ("fp", "x29", 8), ("ip0", "x16", 8), ("ip1", "x17", 8)],
)
def test_aliases(alias: str, full: str, width: int) -> None:
    assert parse_operand(alias) == (Register(full), width)


def test_the_zero_registers_are_constants() -> None:
    assert parse_operand("xzr") == (Constant(0), 8)
    assert parse_operand("wzr") == (Constant(0), 4)


@pytest.mark.parametrize("name", ["d0", "s31", "q7", "v0", "v0.16b", "v3.d[1]", "b1", "h2", "z31", "p15", "ffr"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not among the registers saved at a probe"), 8)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("5", Constant(5)),
        ("-9", Constant(-9)),
        ("#5", Constant(5)),
        ("#-0x10", Constant(-16)),
        ("8+4-2", Constant(10)),
        ("4611686018427387904", Constant(1 << 62)),
        ("[x1]", Memory("x1")),
        ("[sp]", Memory("sp")),
        ("[lr]", Memory("x30")),
        ("[sp, 96]", Memory("sp", 96)),
        ("[sp,96]", Memory("sp", 96)),
        ("[ sp , 96 ]", Memory("sp", 96)),
        ("[x29, -8]", Memory("x29", -8)),
        ("[x29, #-8]", Memory("x29", -8)),
        ("[x29, #8+4]", Memory("x29", 12)),
        ("[x29, 0x10]", Memory("x29", 16)),
        ("[x0, x1]", Memory("x0", 0, "x1")),
        ("[sp, x1]", Memory("sp", 0, "x1")),
        ("[x0, x1, lsl 3]", Memory("x0", 0, "x1", 8)),
        ("[x0, x1, lsl #3]", Memory("x0", 0, "x1", 8)),
        ("[x0, x1, lsl #0]", Memory("x0", 0, "x1")),
        ("[x0, x1, lsl 4]", Memory("x0", 0, "x1", 16)),
        ("[x0, x1, sxtx]", Memory("x0", 0, "x1")),
        ("[x0, x1, sxtx 2]", Memory("x0", 0, "x1", 4)),
        ("counter", Address(None, 0, "counter")),
        ("table+24", Address(None, 24, "table")),
        ("24+table", Address(None, 24, "table")),
        ("#counter", Address(None, 0, "counter")),
        ("x31", Address(None, 0, "x31")),
        ("[x31,-40]", Memory("sp", -40)),
        ("[x31]", Memory("sp")),
        ("[sp,120]", Memory("sp", 120)),
        ("[x29,-40]", Memory("x29", -40)),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[x21, #:lo12:.LANCHOR2]", "the linker's result for this relocation is unknown"),
        ("[x21, :lo12:counter]", "the linker's result for this relocation is unknown"),
        ("[x0, #:got_lo12:counter]", "the linker's result for this relocation is unknown"),
        ("[x0, w5, sxtw 3]", "a 32-bit index, w5, is not supported"),
        ("[x0, w5, uxtw #2]", "a 32-bit index, w5, is not supported"),
        ("[x0, w5, sxtw]", "a 32-bit index, w5, is not supported"),
        (".LC1", ".LC1 is a local label, which is in no symbol table"),
        ("1.5e+0", "floating-point constants are not supported"),
        ("table+2147483648", "the displacement does not fit in 32 bits"),
        ("[x0, 2147483648]", "the displacement does not fit in 32 bits"),
        ("[w0]", "a base register of 4 bytes is not supported"),
        ("[d0]", "the base is not a register of aarch64"),
        ("[xzr]", "the base is not a register of aarch64"),
        ("[]", "the base is not a register of aarch64"),
        ("[96, sp]", "the base is not a register of aarch64"),
        ("[x0, sp]", "not an operand of aarch64"),
        ("[x0, w5]", "not an operand of aarch64"),
        ("[x0, x1, lsl 5]", "not an operand of aarch64"),
        ("[x0, x1, lsl3]", "not an operand of aarch64"),
        ("[x0, x1, sxtw 3]", "not an operand of aarch64"),
        ("[x0, x1, asr 3]", "not an operand of aarch64"),
        ("[x0, x1, x2, lsl 3]", "not an operand of aarch64"),
        ("[x0, ]", "not an operand of aarch64"),
        ("[x0, counter]", "not an operand of aarch64"),
        ("[x0, 8]!", "not an operand of aarch64"),
        ("[x0], 8", "not an operand of aarch64"),
        ("[[x0]]", "not an operand of aarch64"),
        ("[x0", "not an operand of aarch64"),
        ("x0 x1", "not an operand of aarch64"),
        ("%rax", "not an operand of aarch64"),
        ("#", "not an operand of aarch64"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 8)


def test_arguments_of_a_real_note() -> None:
    arguments = parse_arguments("8@x0 -4@[sp, 96] 8@[x21, #:lo12:.LANCHOR2] 4@5 8@[x0, x1, lsl 3] -4@w3", "aarch64")
    assert [argument.operand for argument in arguments] == [
        Register("x0"),
        Memory("sp", 96),
        Unavailable("the linker's result for this relocation is unknown"),
        Constant(5),
        Memory("x0", 0, "x1", 8),
        Register("x3"),
    ]


@pytest.mark.parametrize(
    ("text", "size", "operand"),
    [
        ("[sp, 8] w3", 8, Memory("sp", 8)),
        ("w3", 4, Register("x3")),
        ("8@w3", 8, Register("x3")),
        ("8f@x1", 8, Register("x1")),
        ("8f@d0", 8, Unavailable("d0 is not among the registers saved at a probe")),
        ("16@[x2]", 16, Memory("x2")),
        ("16@x0", 16, Unavailable("16 bytes are in two registers, but the note names only one")),
        ("1@-56", 1, Constant(200)),
    ],
)
def test_sizes(text: str, size: int, operand: Operand) -> None:
    argument = parse_arguments(text, "aarch64")[0]
    assert (argument.size, argument.operand) == (size, operand)
