from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.i386 import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable

WIDTHS = {
    **{f"e{x}x": {4: f"e{x}x", 2: f"{x}x", 1: f"{x}l"} for x in "abcd"},
    **{f"e{x}": {4: f"e{x}", 2: x} for x in ("si", "di", "bp", "sp")},
}


@pytest.mark.parametrize(
    ("full", "width", "name"), [(full, width, name) for full, names in WIDTHS.items() for width, name in names.items()]
)
def test_registers_of_every_width(full: str, width: int, name: str) -> None:
    assert parse_operand(f"%{name}") == (Register(full), width)


@pytest.mark.parametrize("letter", list("abcd"))
def test_high_byte_registers(letter: str) -> None:
    assert parse_operand(f"%{letter}h") == (Register(f"e{letter}x", first_bit=8), 1)


@pytest.mark.parametrize("name", ["si", "di", "bp", "sp"])
def test_lowest_bytes_that_only_gcc_names(name: str) -> None:
    assert parse_operand(f"%{name}l") == (Register(f"e{name}"), 1)


@pytest.mark.parametrize("name", ["xmm0", "ymm7", "mm0", "st", "st(3)", "k1", "gs", "cs", "eip", "cr3"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(f"%{name}") == (Unavailable(f"%{name} is not among the registers saved at a probe"), 4)


@pytest.mark.parametrize("name", ["rax", "r8", "r8d", "r8b", "foo"])
def test_names_of_no_register(name: str) -> None:
    assert parse_operand(f"%{name}") == (Unavailable(f"%{name} is not a register of i386"), 4)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("$5", Constant(5)),
        ("$-9", Constant(-9)),
        ("$0x10", Constant(16)),
        ("$8+4-2", Constant(10)),
        ("$0x3ff8000000000000", Constant(0x3FF8000000000000)),
        ("$counter", Address(None, 0, "counter")),
        ("$table+12", Address(None, 12, "table")),
        ("(%edx)", Memory("edx")),
        ("-8(%ebp)", Memory("ebp", -8)),
        ("0xfffffff8(%ebp)", Memory("ebp", -8)),
        ("8+4(%esp)", Memory("esp", 12)),
        ("(%ebx,%eax)", Memory("ebx", 0, "eax")),
        ("(%ebx,%eax,4)", Memory("ebx", 0, "eax", 4)),
        ("4(%esi, %ebp, 4)", Memory("esi", 4, "ebp", 4)),
        ("(,%eax,8)", Memory(None, 0, "eax", 8)),
        ("16(,%eax)", Memory(None, 16, "eax")),
        ("counter", Memory(None, symbol="counter")),
        ("matrix+24", Memory(None, 24, symbol="matrix")),
        ("52+table", Memory(None, 52, symbol="table")),
        ("seq.6", Memory(None, symbol="seq.6")),
        ("pairs(%eax)", Memory("eax", symbol="pairs")),
        ("matrix+4(%ecx)", Memory("ecx", 4, symbol="matrix")),
        ("pairs(,%eax,4)", Memory(None, 0, "eax", 4, "pairs")),
        ("table(%eax,%edx,2)", Memory("eax", 0, "edx", 2, "table")),
        ("4096", Memory(None, 4096)),
        ("hidden@GOTOFF(%eax)", Memory("eax", symbol="hidden@GOTOFF")),
        ("12+table@GOTOFF(%eax)", Memory("eax", 12, symbol="table@GOTOFF")),
        ("table@GOTOFF(%eax,%edx,4)", Memory("eax", 0, "edx", 4, "table@GOTOFF")),
        ("table@GOTOFF(%edx,%ebx)", Memory("edx", 0, "ebx", 1, "table@GOTOFF")),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("counter@GOT(%eax)", "the address of the global offset table is unknown"),
        ("%gs:mine@ntpoff", "memory relative to a segment register is not supported"),
        ("%gs:0x10", "memory relative to a segment register is not supported"),
        ("mine@ntpoff(%eax)", "the linker's result for this relocation is unknown"),
        (".LC0", ".LC0 is a local label, which is in no symbol table"),
        ("$.LC1", ".LC1 is a local label, which is in no symbol table"),
        ("(%ax)", "a base register of 2 bytes is not supported"),
        ("(%eax,%bx)", "a base register of 2 bytes is not supported"),
        ("(%rax)", "the base is not a register of i386"),
        ("(eax)", "the base is not a register of i386"),
        ("(%eax,%ebx,3)", "not an operand of i386"),
        ("(%eax,%ebx,4,1)", "not an operand of i386"),
        ("(%eax,,4)", "not an operand of i386"),
        ("()", "not an operand of i386"),
        ("(,)", "not an operand of i386"),
        ("!(%eax)", "not an operand of i386"),
        ("$", "not an operand of i386"),
        ("%", "not an operand of i386"),
        ("(%eax", "not an operand of i386"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 4)


TWO_REGISTERS = Unavailable("8 bytes are in two registers, but the note names only one")


@pytest.mark.parametrize(
    ("text", "size", "operand"),
    [
        ("4@%eax", 4, Register("eax")),
        ("-4@%al", 4, Register("eax")),
        ("-8@%eax", 8, TWO_REGISTERS),
        ("8f@%eax", 8, TWO_REGISTERS),
        ("-8@$-1", 8, Constant(-1)),
        ("8@$-1", 8, Constant(2**64 - 1)),
        ("8@4(%esp)", 8, Memory("esp", 4)),
        ("12@24(%esp)", 12, Memory("esp", 24)),
        ("%eax", 4, Register("eax")),
        ("$-1", 4, Constant(2**32 - 1)),
        ("8(%ebp)", 4, Memory("ebp", 8)),
        ("%ah", 1, Register("eax", 8)),
        ("2@%ah", 2, Unavailable("%ah is 1 byte wide, but the note says 2")),
    ],
)
def test_words_have_four_bytes(text: str, size: int, operand: Operand) -> None:
    (argument,) = parse_arguments(text, "i386")
    assert (argument.size, argument.operand) == (size, operand)
