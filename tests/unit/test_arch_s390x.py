from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.s390x import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable


@pytest.mark.parametrize("number", range(16))
def test_registers(number: int) -> None:
    assert parse_operand(f"%r{number}") == (Register(f"r{number}"), 8)


@pytest.mark.parametrize("name", ["%f0", "%f15", "%a0", "%c15", "%v31"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not among the registers saved at a probe"), 8)


@pytest.mark.parametrize("name", ["%r16", "%rax", "%x"])
def test_names_of_no_register(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not a register of s390x"), 8)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("71", Constant(71)),
        ("-9", Constant(-9)),
        ("0x10", Constant(16)),
        ("8+4-2", Constant(10)),
        ("0(%r3)", Memory("r3")),
        ("(%r3)", Memory("r3")),
        ("-28(%r15)", Memory("r15", -28)),
        ("8+4(%r15)", Memory("r15", 12)),
        ("0(%r5,%r4)", Memory("r4", 0, "r5")),
        ("8(%r4, %r1)", Memory("r1", 8, "r4")),
        ("8(,%r1)", Memory("r1", 8)),
        ("8(%r0,%r1)", Memory("r1", 8)),
        ("8(%r1,%r0)", Memory("r1", 8)),
        ("8(%r0)", Memory(None, 8)),
        ("hidden", Address(None, 0, "hidden")),
        ("table+24", Address(None, 24, "table")),
        ("r2", Address(None, 0, "r2")),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("counter@GOTENT", "the address of the global offset table is unknown"),
        ("mine@INDNTPOFF", "the linker's result for this relocation is unknown"),
        (".LANCHOR0+32", ".LANCHOR0 is a local label, which is in no symbol table"),
        ("4294967296(%r1)", "the displacement does not fit in 32 bits"),
        ("0(%f1)", "the base is not a register of s390x"),
        ("0(%r5,)", "the base is not a register of s390x"),
        ("0()", "the base is not a register of s390x"),
        ("0(5,4)", "the base is not a register of s390x"),
        ("0(%r1,%r2,%r3)", "not an operand of s390x"),
        ("!(%r1)", "not an operand of s390x"),
        ("0(%r1", "not an operand of s390x"),
        ("%", "not an operand of s390x"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 8)


def test_arguments_of_a_real_note() -> None:
    arguments = parse_arguments("8@%r2 -4@-28(%r15) 4@71 8@0(%r5,%r4) 8f@%f0", "s390x")
    assert [argument.operand for argument in arguments] == [
        Register("r2"),
        Memory("r15", -28),
        Constant(71),
        Memory("r4", 0, "r5"),
        Unavailable("%f0 is not among the registers saved at a probe"),
    ]
