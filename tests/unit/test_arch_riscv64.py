from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.riscv64 import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable

NAMES = (
    *("ra", "sp", "gp", "tp", "t0", "t1", "t2", "s0", "s1", "a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "s2", "s3"),
    *("s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11", "t3", "t4", "t5", "t6"),
)


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES, start=1)))
def test_registers_by_name_and_by_number(number: int, name: str) -> None:
    assert parse_operand(name) == parse_operand(f"x{number}") == (Register(name), 8)


def test_the_frame_pointer_is_s0() -> None:
    assert parse_operand("fp") == (Register("s0"), 8)


@pytest.mark.parametrize("name", ["zero", "x0"])
def test_the_zero_register_is_a_constant(name: str) -> None:
    assert parse_operand(name) == (Constant(0), 8)


@pytest.mark.parametrize("name", ["f0", "f31", "ft11", "fs0", "fa7", "v31", "fcsr"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not among the registers saved at a probe"), 8)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("5", Constant(5)),
        ("-9", Constant(-9)),
        ("0x10", Constant(16)),
        ("8+4-2", Constant(10)),
        ("0(a1)", Memory("a1")),
        ("(a1)", Memory("a1")),
        ("-88(s0)", Memory("s0", -88)),
        ("-88(fp)", Memory("s0", -88)),
        ("8+4(sp)", Memory("sp", 12)),
        ("16(x2)", Memory("sp", 16)),
        ("8(zero)", Memory(None, 8)),
        ("counter", Address(None, 0, "counter")),
        ("table+24", Address(None, 24, "table")),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("%lo(counter)(a5)", "the linker's result for this relocation is unknown"),
        ("%lo(table+24)(a5)", "the linker's result for this relocation is unknown"),
        ("%tprel_lo(mine)(a5)", "the linker's result for this relocation is unknown"),
        ("%pcrel_lo(.LA0)(a5)", "the linker's result for this relocation is unknown"),
        ("%hi(counter)", "the linker's result for this relocation is unknown"),
        (".LANCHOR0+32", ".LANCHOR0 is a local label, which is in no symbol table"),
        ("4294967296(a0)", "the displacement does not fit in 32 bits"),
        ("0(fa0)", "the base is not a register of riscv64"),
        ("0(x32)", "the base is not a register of riscv64"),
        ("0()", "the base is not a register of riscv64"),
        ("!(a0)", "not an operand of riscv64"),
        ("0(a0", "not an operand of riscv64"),
        ("0((a0))", "not an operand of riscv64"),
        ("a0,a1", "not an operand of riscv64"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 8)


def test_arguments_of_a_real_note() -> None:
    arguments = parse_arguments("8@a1 -4@-88(s0) 4@5 8@%lo(counter)(a5) 1@s11", "riscv64")
    assert [argument.operand for argument in arguments] == [
        Register("a1"),
        Memory("s0", -88),
        Constant(5),
        Unavailable("the linker's result for this relocation is unknown"),
        Register("s11"),
    ]
