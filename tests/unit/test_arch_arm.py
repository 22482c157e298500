from __future__ import annotations

import pytest

from stapsdtd.arch import parse_arguments
from stapsdtd.arch.arm import parse_operand
from stapsdtd.model import Address, Constant, Memory, Operand, Register, Unavailable

ALIASES = {
    **{f"a{number}": f"r{number - 1}" for number in range(1, 5)},
    **{f"v{number}": f"r{number + 3}" for number in range(1, 9)},
    "sb": "r9",
    "sl": "r10",
    "fp": "r11",
    "ip": "r12",
    "sp": "r13",
    "lr": "r14",
    "pc": "r15",
}


@pytest.mark.parametrize("number", range(16))
def test_registers(number: int) -> None:
    assert parse_operand(f"r{number}") == (Register(f"r{number}"), 4)


@pytest.mark.parametrize(("alias", "full"), ALIASES.items())
def test_aliases(alias: str, full: str) -> None:
    assert parse_operand(alias) == (Register(full), 4)


@pytest.mark.parametrize("name", ["d0", "d31", "s0", "s31", "q15", "cpsr", "fpscr"])
def test_registers_that_are_not_saved(name: str) -> None:
    assert parse_operand(name) == (Unavailable(f"{name} is not among the registers saved at a probe"), 4)


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("#5", Constant(5)),
        ("#-9", Constant(-9)),
        ("5", Constant(5)),
        ("#0x10", Constant(16)),
        ("#8+4-2", Constant(10)),
        ("[r3]", Memory("r3")),
        ("[fp, #96]", Memory("r11", 96)),
        ("[fp, #-8]", Memory("r11", -8)),
        ("[fp, #8+4]", Memory("r11", 12)),
        ("[sp,#4]", Memory("r13", 4)),
        ("[sp, 4]", Memory("r13", 4)),
        ("[ip, #4294967292]", Memory("r12", -4)),
        ("[r3, r4]", Memory("r3", 0, "r4")),
        ("[r3, +r4]", Memory("r3", 0, "r4")),
        ("[r0, ip]", Memory("r0", 0, "r12")),
        ("[r2, r0, lsl #2]", Memory("r2", 0, "r0", 4)),
        ("[r2, r0, lsl 2]", Memory("r2", 0, "r0", 4)),
        ("[r2, r0, lsl #0]", Memory("r2", 0, "r0")),
        ("#counter", Address(None, 0, "counter")),
        ("#table+12", Address(None, 12, "table")),
        ("counter", Address(None, 0, "counter")),
        ("table+12", Address(None, 12, "table")),
    ],
)
def test_constants_memory_and_addresses(text: str, operand: Operand) -> None:
    assert parse_operand(text) == (operand, 4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (".L.str", ".L.str is a local label, which is in no symbol table"),
        (".L7+4", ".L7 is a local label, which is in no symbol table"),
        ("#.LANCHOR0+4", ".LANCHOR0 is a local label, which is in no symbol table"),
        ("#:lower16:counter", "the linker's result for this relocation is unknown"),
        ("[r0, #:lower0_7:counter]", "the linker's result for this relocation is unknown"),
        ("#1.5e+0", "floating-point constants are not supported"),
        ("[r0, -r1]", "a subtracted index is not supported"),
        ("[r0, -r1, lsl #2]", "a subtracted index is not supported"),
        ("[r0, r1, asr #2]", "a right-shifted index is not supported"),
        ("[r0, r1, rrx]", "a right-shifted index is not supported"),
        ("[pc, #8]", "relative to the pc of an unknown instruction"),
        ("[d0]", "the base is not a register of arm"),
        ("[]", "the base is not a register of arm"),
        ("[r16]", "the base is not a register of arm"),
        ("[r0, pc]", "not an operand of arm"),
        ("[r0, r1, lsl #32]", "not an operand of arm"),
        ("[r0, r1, lsl]", "not an operand of arm"),
        ("[r0, r1, r2]", "not an operand of arm"),
        ("[r0, #4, lsl #2]", "not an operand of arm"),
        ("[r0, #]", "not an operand of arm"),
        ("[r0, counter]", "not an operand of arm"),
        ("[r0, #4]!", "not an operand of arm"),
        ("[r0], #4", "not an operand of arm"),
        ("{r0, r1}", "not an operand of arm"),
        ("#", "not an operand of arm"),
        ("", "the operand is missing"),
    ],
)
def test_forms_that_are_not_fetched(text: str, reason: str) -> None:
    assert parse_operand(text) == (Unavailable(reason), 4)


def test_arguments_of_a_real_note() -> None:
    arguments = parse_arguments("4@r0 -4@[fp, #-96] 4@#5 1@[r2, r0, lsl #2] 4@.L.str -4@lr", "arm")
    assert [argument.operand for argument in arguments] == [
        Register("r0"),
        Memory("r11", -96),
        Constant(5),
        Memory("r2", 0, "r0", 4),
        Unavailable(".L.str is a local label, which is in no symbol table"),
        Register("r14"),
    ]


TWO_REGISTERS = Unavailable("8 bytes are in two registers, but the note names only one")


@pytest.mark.parametrize(
    ("text", "size", "operand"),
    [
        ("-2@lr", 2, Register("r14")),
        ("-8@r0", 8, TWO_REGISTERS),
        ("8f@r2", 8, TWO_REGISTERS),
        ("4f@r2", 4, Register("r2")),
        ("-8@#-1", 8, Constant(-1)),
        ("8@[sp]", 8, Memory("r13")),
        ("12@[sp, #12]", 12, Memory("r13", 12)),
        ("r0", 4, Register("r0")),
        ("#-1", 4, Constant(2**32 - 1)),
        ("[sp, #4]", 4, Memory("r13", 4)),
    ],
)
def test_words_have_four_bytes(text: str, size: int, operand: Operand) -> None:
    (argument,) = parse_arguments(text, "arm")
    assert (argument.size, argument.operand) == (size, operand)
