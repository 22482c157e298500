from __future__ import annotations

import pytest

from stapsdtd.arch.x86_64 import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable

WIDTHS = {
    **{f"r{x}x": {8: f"r{x}x", 4: f"e{x}x", 2: f"{x}x", 1: f"{x}l"} for x in "abcd"},
    **{f"r{x}": {8: f"r{x}", 4: f"e{x}", 2: x, 1: f"{x}l"} for x in ("si", "di", "bp", "sp")},
    **{f"r{n}": {8: f"r{n}", 4: f"r{n}d", 2: f"r{n}w", 1: f"r{n}b"} for n in range(8, 16)},
}


@pytest.mark.parametrize(
    ("full", "width", "name"), [(full, width, name) for full, names in WIDTHS.items() for width, name in names.items()]
)
def test_registers_of_every_width(full: str, width: int, name: str) -> None:
    assert parse_operand(f"%{name}") == (Register(full), width)


@pytest.mark.parametrize("letter", list("abcd"))
def test_high_byte_registers(letter: str) -> None:
    assert parse_operand(f"%{letter}h") == (Register(f"r{letter}x", first_bit=8), 1)


@pytest.mark.parametrize(
    "name",
    ["xmm0", "xmm15", "ymm3", "zmm31", "mm0", "st", "st(3)", "k1", "fs", "cs", "rip", "r16", "r31", "cr3"],
)
def test_registers_that_are_not_saved(name: str) -> None:
    operand, _ = parse_operand(f"%{name}")
    assert operand == Unavailable(f"%{name} is not among the registers saved at a probe")


@pytest.mark.parametrize("name", ["foo", "r32", "r8l", "rah", "sih", "eh", "raxx"])
def test_names_of_no_register(name: str) -> None:
    assert parse_operand(f"%{name}")[0] == Unavailable(f"%{name} is not a register of x86-64")


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("$5", Constant(5)),
        ("$-9", Constant(-9)),
        ("$+3", Constant(3)),
        ("$0x10", Constant(16)),
        ("$-0X1f", Constant(-31)),
        ("$010", Constant(8)),
        ("$0", Constant(0)),
        ("$8+4-2", Constant(10)),
        ("(%rax)", Memory("rax")),
        ("-8(%rbp)", Memory("rbp", -8)),
        ("0x10(%rsp)", Memory("rsp", 16)),
        ("8+4(%rax)", Memory("rax", 12)),
        ("-8+4(%r15)", Memory("r15", -4)),
        ("0xfffffffffffffff8(%rbp)", Memory("rbp", -8)),
        ("2147483647(%rbp)", Memory("rbp", 2**31 - 1)),
        ("-2147483648(%rbp)", Memory("rbp", -(2**31))),
        ("(%rax,%rcx)", Memory("rax", 0, "rcx")),
        ("8(%rbp,%rcx,4)", Memory("rbp", 8, "rcx", 4)),
        ("(,%rcx,8)", Memory(None, 0, "rcx", 8)),
        ("NBuffers(%rip)", Memory(None, symbol="NBuffers")),
        ("52+CheckpointStats(%rip)", Memory(None, 52, symbol="CheckpointStats")),
        ("CheckpointStats-4(%rip)", Memory(None, -4, symbol="CheckpointStats")),
        ("seq.6(%rip)", Memory(None, symbol="seq.6")),
        ("sym", Memory(None, symbol="sym")),
        ("-8+sym+4", Memory(None, -4, symbol="sym")),
        ("table(%rax)", Memory("rax", symbol="table")),
        ("table(,%rax,8)", Memory(None, 0, "rax", 8, "table")),
        ("8+table(%rax,%rbx,2)", Memory("rax", 8, "rbx", 2, "table")),
        ("4096", Memory(None, 4096)),
        ("$sym", Address(None, symbol="sym")),
    ],
)
def test_constants_and_memory(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("stdout@GOTPCREL(%rip)", "the address of the global offset table is unknown"),
        ("callee@PLT", "the linker's result for this relocation is unknown"),
        ("$.LC0+4", ".LC0 is a local label, which is in no symbol table"),
        ("$.LC0-.", "not an operand of x86-64"),
        ("8(%rip)", "relative to the %rip of an unknown instruction"),
        ("(%rax,%rcx,3)", "not an operand of x86-64"),
        ("(%rax,,2)x", "not an operand of x86-64"),
        ("(,)", "not an operand of x86-64"),
        ("8(%rax,%ecx)", "a base register of 4 bytes is not supported"),
        ("sym+0x100000000", "the displacement does not fit in 32 bits"),
        ("2147483648", "the displacement does not fit in 32 bits"),
        ("%fs:0x10", "memory relative to a segment register is not supported"),
        ("%gs:8(%rax)", "memory relative to a segment register is not supported"),
        ("(%eax)", "a base register of 4 bytes is not supported"),
        ("(%xmm0)", "the base is not a register of x86-64"),
        ("(rax)", "the base is not a register of x86-64"),
        ("()", "not an operand of x86-64"),
        ("2147483648(%rbp)", "the displacement does not fit in 32 bits"),
        ("$", "not an operand of x86-64"),
        ("$5 %rax", "not an operand of x86-64"),
        ("QWORD PTR [rbp-8]", "not an operand of x86-64"),
        ("(%rax", "not an operand of x86-64"),
        ("-8(%rbp)x", "not an operand of x86-64"),
        ("%", "not an operand of x86-64"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 8)
