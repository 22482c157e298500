from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.loongarch64 import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable

ABI_NAMES = {
    "ra": 1,
    "tp": 2,
    "sp": 3,
    "x": 21,
    "u0": 21,
    "fp": 22,
    "s9": 22,
    "v0": 4,
    "v1": 5,
    **{f"a{number}": 4 + number for number in range(8)},
    **{f"t{number}": 12 + number for number in range(9)},
    **{f"s{number}": 23 + number for number in range(9)},
}


@pytest.mark.parametrize("number", range(1, 32))
def test_registers(number: int) -> None:
    assert parse_operand(f"$r{number}") == (Register(f"r{number}"), 8)


@pytest.mark.parametrize(("name", "number"), list(ABI_NAMES.items()))
def test_names_of_the_abi(name: str, number: int) -> None:
    assert parse_operand(f"${name}") == (Register(f"r{number}"), 8)


@pytest.mark.parametrize("name", ["$zero", "$r0"])
def test_the_zero_register_is_a_constant(name: str) -> None:
    assert parse_operand(name) == (Constant(0), 8)


@pytest.mark.parametrize("name", ["$f0", "$fa7", "$ft15", "$fs0", "$vr31", "$xr0", "$fcc0"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not among the registers saved at a probe"), 8)


@pytest.mark.parametrize("name", ["$r32", "$a8", "$foo"])
def test_names_of_no_register(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not a register of loongarch64"), 8)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("5", Constant(5)),
        ("-9", Constant(-9)),
        ("0x10", Constant(16)),
        ("8+4-2", Constant(10)),
        ("[$r4, 8]", Memory("r4", 8)),
        ("[$r4,8]", Memory("r4", 8)),
        ("[$r4]", Memory("r4")),
        ("[$sp, -16]", Memory("r3", -16)),
        ("$r4,8", Memory("r4", 8)),
        ("$fp,-20", Memory("r22", -20)),
        ("$r3,8+4", Memory("r3", 12)),
        ("$r12,$r13", Memory("r12", 0, "r13")),
        ("[$r12, $r13]", Memory("r12", 0, "r13")),
        ("$r12,$zero", Memory("r12")),
        ("$zero,$r12", Memory("r12")),
        ("$zero,8", Memory(None, 8)),
        ("counter", Address(None, 0, "counter")),
        ("table+24", Address(None, 24, "table")),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 8)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("$r4,%pc_lo12(counter)", "the linker's result for this relocation is unknown"),
        ("%pc_hi20(counter)", "the linker's result for this relocation is unknown"),
        (".LC0", ".LC0 is a local label, which is in no symbol table"),
        ("$r4,4294967296", "the displacement does not fit in 32 bits"),
        ("$f4,8", "the base is not a register of loongarch64"),
        ("[r4, 8]", "the base is not a register of loongarch64"),
        ("[]", "the base is not a register of loongarch64"),
        ("$r4,", "not an operand of loongarch64"),
        ("[$r4, ]", "not an operand of loongarch64"),
        ("$r4,$f0", "not an operand of loongarch64"),
        ("$r4,counter", "not an operand of loongarch64"),
        ("[$r4, 8", "the base is not a register of loongarch64"),
        ("[$r4", "not an operand of loongarch64"),
        ("$", "not an operand of loongarch64"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 8)


def test_arguments_of_a_real_note() -> None:
    arguments = parse_arguments("8@$r4 -4@[$r4, 8] 4@5 -8@$r3,16 1@$a0", "loongarch64")
    assert [argument.operand for argument in arguments] == [
        Register("r4"),
        Memory("r4", 8),
        Constant(5),
        Memory("r3", 16),
        Register("r4"),
    ]
