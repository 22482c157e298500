from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.ppc64le import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable


@pytest.mark.parametrize("number", range(32))
def test_registers_in_every_spelling(number: int) -> None:
    for text in (f"{number}", f"r{number}", f"%r{number}"):
        assert parse_operand(text) == (Register(f"r{number}"), 8)


@pytest.mark.parametrize("name", ["%f0", "f31", "%v31", "%vs63", "%cr7", "vrsave"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not among the registers saved at a probe"), 8)


@pytest.mark.parametrize("name", ["%r32", "%rax"])
def test_names_of_no_register(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not a register of ppc64le"), 8)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("i42", Constant(42)),
        ("i-9", Constant(-9)),
        ("i0x10", Constant(16)),
        ("i8+4-2", Constant(10)),
        ("0(8)", Memory("r8")),
        ("(8)", Memory("r8")),
        ("8(3)", Memory("r3", 8)),
        ("-16(31)", Memory("r31", -16)),
        ("8+4(%r1)", Memory("r1", 12)),
        ("3,9", Memory("r3", 0, "r9")),
        ("3, 9", Memory("r3", 0, "r9")),
        ("%r3,%r9", Memory("r3", 0, "r9")),
        ("0,9", Memory("r9")),
        ("9,0", Memory("r9", 0, "r0")),
        ("8(0)", Memory(None, 8)),
        ("counter", Address(None, 0, "counter")),
        ("table+24", Address(None, 24, "table")),
        ("index", Address(None, 0, "index")),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (".LC1@toc@l(7)", "the linker's result for this relocation is unknown"),
        ("counter@toc(2)", "the linker's result for this relocation is unknown"),
        ("counter@pcrel", "the linker's result for this relocation is unknown"),
        (".LANCHOR0+40", ".LANCHOR0 is a local label, which is in no symbol table"),
        ("4294967296(1)", "the displacement does not fit in 32 bits"),
        ("0(32)", "the base is not a register of ppc64le"),
        ("0(f1)", "the base is not a register of ppc64le"),
        ("3,32", "the base is not a register of ppc64le"),
        ("3,", "the base is not a register of ppc64le"),
        ("3,4,5", "the base is not a register of ppc64le"),
        ("0()", "the base is not a register of ppc64le"),
        ("32", "not an operand of ppc64le"),
        ("-9", "not an operand of ppc64le"),
        ("!(1)", "not an operand of ppc64le"),
        ("0(1", "not an operand of ppc64le"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 8)


def test_arguments_of_a_real_note() -> None:
    arguments = parse_arguments("8@3 8@%r3 -4@8(3) -4@i42 8@0(8) 1@3,9 -1@i200", "ppc64le")
    assert [argument.operand for argument in arguments] == [
        Register("r3"),
        Register("r3"),
        Memory("r3", 8),
        Constant(42),
        Memory("r8"),
        Memory("r3", 0, "r9"),
        Constant(-56),
    ]
