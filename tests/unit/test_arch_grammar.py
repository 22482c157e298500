from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.arch import parse_arguments
from stapsdtd.model import Argument, Constant, Memory, Operand, Register, Unavailable

SIZES = st.sampled_from([1, 2, 4, 8])

FULL = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16))]


def reason(text: str, architecture: str = "x86-64") -> str:
    (argument,) = parse_arguments(text, architecture)
    assert argument.text == text
    assert isinstance(argument.operand, Unavailable)
    return argument.operand.reason


@pytest.mark.parametrize("text", ["", ":", "  ", " : ", "\n"])
def test_a_probe_without_arguments(text: str) -> None:
    assert parse_arguments(text, "x86-64") == ()


def test_arguments_of_a_real_note() -> None:
    assert parse_arguments("-4@$5 8@-16(%rbp) 1@%r15b", "x86-64") == (
        Argument("-4@$5", 4, signed=True, is_float=False, operand=Constant(5)),
        Argument("8@-16(%rbp)", 8, signed=False, is_float=False, operand=Memory("rbp", -16)),
        Argument("1@%r15b", 1, signed=False, is_float=False, operand=Register("r15")),
    )


@pytest.mark.parametrize(
    ("text", "size", "signed", "operand"),
    [
        ("8@%eax", 8, False, Register("rax")),
        ("-4@%rdi", 4, True, Register("rdi")),
        ("2@%sil", 2, False, Register("rsi")),
        ("1@%ah", 1, False, Register("rax", 8)),
        ("04@%rax", 4, False, Register("rax")),
        ("4@$-1", 4, False, Constant(4294967295)),
        ("-4@$-1", 4, True, Constant(-1)),
        ("-1@$255", 1, True, Constant(-1)),
        ("-1@$128", 1, True, Constant(-128)),
        ("-1@$127", 1, True, Constant(127)),
        ("1@$256", 1, False, Constant(0)),
        ("8@$-1", 8, False, Constant(2**64 - 1)),
        ("-8@$0xffffffffffffffff", 8, True, Constant(-1)),
    ],
)
def test_the_notes_size_and_sign_govern(text: str, size: int, signed: bool, operand: Constant | Register) -> None:
    assert parse_arguments(text, "x86-64") == (Argument(text, size, signed=signed, is_float=False, operand=operand),)


@pytest.mark.parametrize(
    ("text", "size", "operand"),
    [
        ("%rax", 8, Register("rax")),
        ("%eax", 4, Register("rax")),
        ("%r9w", 2, Register("r9")),
        ("%dil", 1, Register("rdi")),
        ("%ch", 1, Register("rcx", 8)),
        ("$7", 8, Constant(7)),
        ("$-1", 8, Constant(2**64 - 1)),
        ("-8(%rbp)", 8, Memory("rbp", -8)),
    ],
)
def test_without_a_size_an_argument_is_as_wide_as_its_operand(
    text: str, size: int, operand: Constant | Register | Memory
) -> None:
    assert parse_arguments(text, "x86-64") == (Argument(text, size, signed=False, is_float=False, operand=operand),)


def test_old_and_new_arguments_in_one_note() -> None:
    arguments = parse_arguments("%rax (%rbx, %rcx, 4)\t$5 4@%edi", "x86-64")
    assert [argument.text for argument in arguments] == ["%rax", "(%rbx, %rcx, 4)", "$5", "4@%edi"]


@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("x86-64", ["8@$10", "%rdi", "4@%eax"]),
        ("x86-64", ["%rdi", "4@%eax", "-8(%rbp, %rcx, 4)", "$-3", "-1@%al"]),
        ("x86-64", ["4@$1", "$2", "$3", "counter+8(%rip)"]),
        ("i386", ["-4@%esi", "%edi", "hidden@GOTOFF(%eax)", "2@%ax"]),
        ("aarch64", ["8@[sp, 96]", "x0", "[x0, x1, lsl 3]", "5", "4@w1"]),
        ("arm", ["4@[fp, #-8]", "#5", "[r2, r0, lsl #2]", "4@r0"]),
        ("ppc64le", ["8@8(3)", "4", "-4@i42"]),
        ("s390x", ["8@0(%r5,%r4)", "%r2", "-4@71"]),
        ("riscv64", ["-4@-88(s0)", "a1", "8@a0"]),
        ("loongarch64", ["8@$r4, 8", "$r5", "[$r4, 8]", "4@$r6"]),
    ],
)
def test_arguments_with_and_without_a_size_in_any_order(architecture: str, arguments: list[str]) -> None:
    for turn in range(len(arguments)):
        turned = arguments[turn:] + arguments[:turn]
        parsed = parse_arguments(" ".join(turned), architecture)
        assert [argument.text for argument in parsed] == turned
        assert not [argument for argument in parsed if isinstance(argument.operand, Unavailable)]


@pytest.mark.parametrize("text", ["8@[sp, 96 4", "8@(%rax 5", "8@%rax) 5 6", "[x0 5"])
def test_with_a_bracket_too_many_nobody_knows_where_an_operand_ends(text: str) -> None:
    assert reason(text, "aarch64")


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 16, 24, 32, 4096])
def test_values_of_other_sizes_are_in_memory(size: int) -> None:
    (argument,) = parse_arguments(f"{size}@(%rax)", "x86-64")
    assert (argument.size, argument.operand) == (size, Memory("rax", 0))
    is_pair = 8 < size <= 16
    in_two = f"{size} bytes are in two registers, but the note names only one"
    assert reason(f"{size}@%rax") == (in_two if is_pair else f"a value of {size} bytes is supported only in memory")


@pytest.mark.parametrize(
    ("architecture", "register", "size"),
    [
        ("x86-64", "%rax", 16),
        ("i386", "%eax", 8),
        ("aarch64", "x0", 16),
        ("arm", "r0", 8),
        ("ppc64le", "3", 16),
        ("s390x", "%r2", 16),
        ("riscv64", "a0", 16),
        ("loongarch64", "$r4", 16),
    ],
)
def test_a_struct_in_two_registers_costs_itself_alone(architecture: str, register: str, size: int) -> None:
    first, last = parse_arguments(f"{size}@{register} -4@{register}", architecture)
    assert first.operand == Unavailable(f"{size} bytes are in two registers, but the note names only one")
    assert isinstance(last.operand, Register)


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        *(("x86-64", text) for text in ("[sp,120]", "[x31,-40]", "$r4,8", ".LC0", "$.LC0")),
        *(("aarch64", text) for text in ("-40(%rbp)", "%sil", ".LC0", "#.LANCHOR0+8")),
        *(("arm", text) for text in ("[x31,-40]", "%sil", ".L.str")),
        *(("riscv64", text) for text in ("[sp,120]", ".L7")),
    ],
)
def test_what_another_machine_or_the_assembler_alone_knows_has_a_reason(architecture: str, text: str) -> None:
    (argument,) = parse_arguments(f"4@{text}", architecture)
    assert isinstance(argument.operand, Unavailable)
    assert architecture in argument.operand.reason or "a local label, which is in no" in argument.operand.reason


@pytest.mark.parametrize("size", [0, 4097, 1 << 20])
def test_values_of_no_size_and_of_too_large_a_one(size: int) -> None:
    assert reason(f"{size}@(%rax)") == f"a value of {size} bytes is not supported; the limit is 4096"


@pytest.mark.parametrize("digits", ["1048577", "9" * 30, "1" * 5000])
def test_a_size_that_fits_no_integer_of_the_api(digits: str) -> None:
    (argument,) = parse_arguments(f"-{digits}@%rax", "x86-64")
    assert (argument.size, argument.operand) == (0, Unavailable("the size is out of range"))


@pytest.mark.parametrize(
    ("text", "size", "operand"),
    [
        ("8f@%rax", 8, Register("rax")),
        ("4f@-20(%rbp)", 4, Memory("rbp", -20)),
        ("-8f@(%rax)", 8, Memory("rax")),
        ("16f@(%rax)", 16, Memory("rax")),
        ("8f@%xmm0", 8, Unavailable("%xmm0 is not among the registers saved at a probe")),
        ("8f@$5", 8, Unavailable("a constant cannot be a floating-point number")),
        ("8f@$sym", 8, Unavailable("a constant cannot be a floating-point number")),
        ("2f@%ax", 2, Unavailable("2-byte floating-point numbers are not supported")),
        ("1f@(%rax)", 1, Unavailable("1-byte floating-point numbers are not supported")),
    ],
)
def test_floats(text: str, size: int, operand: Operand) -> None:
    (argument,) = parse_arguments(text, "x86-64")
    assert (argument.is_float, argument.size, argument.operand) == (True, size, operand)


def test_above_a_high_byte_register_lies_nothing() -> None:
    assert reason("4@%ah") == "%ah is 1 byte wide, but the note says 4"


def test_an_operand_outside_the_grammar_costs_only_itself() -> None:
    arguments = parse_arguments("8@%rdi 8f@%xmm1 4@nonsense! 4@ 16@(%rax) -4@%esi", "x86-64")
    assert [isinstance(argument.operand, Unavailable) for argument in arguments] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert arguments[5].operand == Register("rsi")
    assert arguments[3].operand == Unavailable("the operand is missing")


@pytest.mark.parametrize(
    ("architecture", "text", "pieces"),
    [
        ("aarch64", "8@x0 -4@[sp, 96] 8@[x21, #:lo12:.LANCHOR2] 4@5", 4),
        ("aarch64", "8@[x0, x1, lsl 3] 8f@d0", 2),
        ("arm", "4@r0 4@[fp, #96] 4@#5 4@[r2, r0, lsl #2] 4@.L.str", 5),
        ("s390x", "8@%r2 -4@-28(%r15) 4@71 8@0(%r5,%r4)", 4),
        ("i386", "8f@d@GOTOFF(%eax) 4@%eax", 2),
        ("loongarch64", "8@$r4 -4@[$r4, 8]", 2),
        ("machine-8", "[$4, 8] r5", 2),
    ],
)
def test_other_architectures_arguments_are_told_apart(architecture: str, text: str, pieces: int) -> None:
    arguments = parse_arguments(text, architecture)
    assert len(arguments) == pieces
    assert " ".join(argument.text for argument in arguments) == text
    if architecture == "machine-8":
        assert {argument.operand for argument in arguments} == {
            Unavailable("operands of machine-8 are not supported yet")
        }


def reduced(value: int, size: int, *, signed: bool) -> int:
    return int.from_bytes((value % 2 ** (8 * size)).to_bytes(size, "little"), "little", signed=signed)


@st.composite
def arguments(draw: st.DrawFn) -> Argument:
    size, signed = draw(SIZES), draw(st.booleans())
    operand: Constant | Register | Memory
    match draw(st.integers(0, 3)):
        case 0:
            value = draw(st.integers(-(2**63), 2**64 - 1))
            digits = str(value) if draw(st.booleans()) else f"{'-' if value < 0 else ''}0x{abs(value):x}"
            text, operand = f"${digits}", Constant(reduced(value, size, signed=signed))
        case 1:
            full = draw(st.sampled_from(FULL))
            text, operand = f"%{full}", Register(full)
        case 2:
            size = 1
            letter = draw(st.sampled_from("abcd"))
            text, operand = f"%{letter}h", Register(f"r{letter}x", 8)
        case _:
            full = draw(st.sampled_from(FULL))
            terms = draw(st.lists(st.integers(-(2**24), 2**24), max_size=3))
            shown = "".join(f"{term:+d}" for term in terms).removeprefix("+")
            text, operand = f"{shown}(%{full})", Memory(full, sum(terms))
    return Argument(f"{'-' if signed else ''}{size}@{text}", size, signed=signed, is_float=False, operand=operand)


@given(st.lists(arguments(), max_size=14), st.sampled_from([" ", "  ", "\t"]))
def test_what_is_written_is_read(wanted: list[Argument], blank: str) -> None:
    text = blank.join(argument.text for argument in wanted)
    assert parse_arguments(text, "x86-64") == tuple(wanted)


PIECES = st.lists(
    st.sampled_from(
        ["8@", "-4@", "f@", "%", "rax", "(", ")", "[", "]", ",", "$", "-", "+", "0x", "9", "٣", " ", ":", "@", "\0"]
    ),
    max_size=40,
).map("".join)


@given(PIECES | st.text(max_size=60), st.sampled_from(["x86-64", "aarch64", "machine-8"]))
def test_nothing_raises_and_every_argument_fits_the_api(text: str, architecture: str) -> None:
    for argument in parse_arguments(text, architecture):
        assert 0 <= argument.size <= 1 << 20
        assert argument.text in text
        if isinstance(argument.operand, Memory):
            assert -(2**31) <= argument.operand.displacement < 2**31
        if isinstance(argument.operand, Constant):
            assert -(2**63) <= argument.operand.value < 2**64


@pytest.mark.parametrize(
    "text",
    [
        "(" * 4096,
        "[(" * 2048,
        "8@" + "a" * 4093 + "!",
        "8@" + "1+" * 2047,
        "8@" + "1" * 4094,
        "1 " * 2048,
        "8@$" + "_" * 4092 + "(",
    ],
)
@pytest.mark.timeout(60)
def test_hostile_strings_take_no_time(text: str) -> None:
    for _ in range(20):
        parse_arguments(text, "x86-64")
