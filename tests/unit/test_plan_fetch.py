from __future__ import annotations

import pytest

from stapsdtd.model import Address, Capture, Constant, Memory, Operand, Register, Unavailable
from stapsdtd.plan.fetch import Fetch, SlotKind, fetch
from tests.unit.samples import argument

X86_64 = "x86-64"


def taken(operand: Operand, size: int = 8, *, is_string: bool = False) -> Fetch | Constant | Unavailable:
    return fetch(Capture(0, is_string), argument(operand, size, text="TEXT"), X86_64)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_register_is_fetched_whole_whatever_the_width(size: int) -> None:
    assert taken(Register("rdi"), size) == Fetch(SlotKind.QUAD, "%di:u64")


def test_high_byte_register_is_fetched_whole() -> None:
    assert taken(Register("rax", first_bit=8), 1) == Fetch(SlotKind.QUAD, "%ax:u64")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, Fetch(SlotKind.BYTE, "-8(%bp):u8")),
        (2, Fetch(SlotKind.WORD, "-8(%bp):u16")),
        (4, Fetch(SlotKind.DOUBLE, "-8(%bp):u32")),
        (8, Fetch(SlotKind.QUAD, "-8(%bp):u64")),
    ],
)
def test_memory_is_fetched_at_its_width(size: int, expected: Fetch) -> None:
    assert taken(Memory("rbp", -8), size) == expected


@pytest.mark.parametrize(("displacement", "shown"), [(0, "+0"), (16, "+16"), (-1, "-1")])
def test_displacement_always_has_a_sign(displacement: int, shown: str) -> None:
    assert taken(Memory("r12", displacement)) == Fetch(SlotKind.QUAD, f"{shown}(%r12):u64")


@pytest.mark.parametrize(
    ("operand", "expression"),
    [
        (Register("rsi"), "+0(%si):ustring"),
        (Memory("rsp", 8), "+0(+8(%sp)):ustring"),
        (Constant(0x404010), "@0x404010:ustring"),
    ],
)
def test_strings(operand: Operand, expression: str) -> None:
    assert taken(operand, is_string=True) == Fetch(SlotKind.STRING, expression)


@pytest.mark.parametrize("operand", [Register("rsi"), Memory("rsp"), Constant(5)])
def test_what_is_narrower_than_a_pointer_is_no_string(operand: Operand) -> None:
    assert taken(operand, 4, is_string=True) == Unavailable("TEXT is 4 bytes wide, which is no pointer to a string")


@pytest.mark.parametrize("operand", [Register("rsi"), Memory("rsp"), Constant(5)])
def test_bytes_are_not_fetched(operand: Operand) -> None:
    capture = Capture(0, is_buffer=True, max_bytes=16)
    reason = "TEXT: the ftrace engine cannot fetch the bytes it points to"
    assert fetch(capture, argument(operand, text="TEXT"), X86_64) == Unavailable(reason)


def test_constants_and_the_unavailable_are_not_fetched() -> None:
    assert taken(Constant(-5)) == Constant(-5)
    assert taken(Unavailable("because")) == Unavailable("because")
    assert taken(Unavailable("because"), is_string=True) == Unavailable("because")


@pytest.mark.parametrize("operand", [Register("xmm0"), Memory("eip")])
@pytest.mark.parametrize("is_string", [False, True])
def test_registers_without_a_name_in_tracefs(operand: Operand, is_string: bool) -> None:
    reason = "TEXT: tracefs has no name for this register on x86-64"
    assert taken(operand, is_string=is_string) == Unavailable(reason)


@pytest.mark.parametrize("is_string", [False, True])
def test_base_and_index_are_more_than_tracefs_can_add(is_string: bool) -> None:
    reason = "TEXT: tracefs cannot add a base and an index"
    assert taken(Memory("rbp", 8, "rcx", 4), is_string=is_string) == Unavailable(reason)


def test_what_lies_at_a_symbol_is_found_from_the_site() -> None:
    assert taken(Memory("rip", 4096, symbol="x"), 4) == Fetch(SlotKind.DOUBLE, "+4096(%ip):u32")
    assert taken(Memory("rip", -16, symbol="x"), is_string=True) == Fetch(SlotKind.STRING, "+0(-16(%ip)):ustring")
    assert taken(Address("rip", 32, "text"), is_string=True) == Fetch(SlotKind.STRING, "+32(%ip):ustring")
    assert taken(Address("rip", 32, "text")) == Unavailable("TEXT: tracefs cannot fetch the address of a symbol")
    assert taken(Memory(None, 0x601040), 2) == Fetch(SlotKind.WORD, "@0x601040:u16")


@pytest.mark.parametrize(
    ("architecture", "operand", "expression"),
    [
        ("i386", Register("eax"), "%ax:u64"),
        ("aarch64", Register("x0"), "%x0:u64"),
        ("aarch64", Memory("sp", 16), "+16(%sp):u64"),
        ("riscv64", Memory("pc", 64, symbol="x"), "+64(%epc):u64"),
        ("riscv64", Register("s11"), "%s11:u64"),
        ("ppc64le", Register("r3"), "%gpr3:u64"),
        ("s390x", Memory("r15", 160), "+160(%r15):u64"),
        ("loongarch64", Register("r4"), "%r4:u64"),
    ],
)
def test_registers_as_each_kernel_names_them(architecture: str, operand: Operand, expression: str) -> None:
    assert fetch(Capture(0), argument(operand), architecture) == Fetch(SlotKind.QUAD, expression)


def test_unknown_architectures_have_no_registers() -> None:
    found = fetch(Capture(0), argument(Register("x0"), text="8@x0"), "machine-8")
    assert found == Unavailable("8@x0: tracefs has no name for this register on machine-8")
