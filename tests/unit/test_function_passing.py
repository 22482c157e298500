"""In which registers arguments are: what a function finds there is right."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from stapsdtd.arch.aarch64 import AARCH64
from stapsdtd.arch.riscv64 import RISCV64
from stapsdtd.arch.x86_64 import X86_64
from stapsdtd.functions.passing import Passed, passed_arguments, passed_result
from stapsdtd.kernel.btf import Btf
from tests.support import require
from tests.unit.kernel_types import btf_path, printed, prototype


@pytest.fixture
def types() -> Iterator[Btf]:
    with Btf(str(btf_path())) as opened:
        yield opened


def test_registers_hold_what_was_passed(types: Btf) -> None:
    """Word w of argument a is 100 * a + w, so that each register says what it holds."""
    require(platform.machine() == "x86_64", "x86-64")
    calls = {line[1]: list(map(int, line[2:])) for line in printed() if line[0] == "call"}
    assert len(calls) == 9
    for name, values in calls.items():
        held = dict(zip(("rdi", "rsi", "rdx", "rcx", "r8", "r9"), values, strict=True))
        for number, passed in enumerate(passed_arguments(types, prototype(types, name), X86_64), 1):
            expected = [100 * number + word for word in range(1, len(passed.registers) + 1)]
            assert [held[register] for register in passed.registers] == expected, name


X0_X1 = ("x0", "x1")


@pytest.mark.parametrize(
    ("name", "registers"),
    [
        ("with_pair", [("x0",), ("x1", "x2"), ("x3",)]),
        ("with_large", [("x0",), (), ("x2",)]),
        ("with_odd", [("x0",), ("x1", "x2"), ("x3",)]),
        ("with_empty", [("x0",), (), ("x1",)]),
        ("with_wide", [("x0",), ("x2", "x3"), ("x4",)]),
        ("with_float", [("x0",), (), ("x1",)]),
        ("with_many", [("x0",), ("x1",), ("x2",), ("x3",), ("x4",), ("x5", "x6"), ("x7",), (), (), ()]),
        ("returns_large", [("x0",), ("x1",)]),
    ],
)
def test_aarch64(types: Btf, name: str, registers: list[tuple[str, ...]]) -> None:
    """AAPCS64, section 6.8.2, stages A to C: a large struct is a pointer, wide numbers begin at even registers."""
    assert [passed.registers for passed in passed_arguments(types, prototype(types, name), AARCH64)] == registers


@pytest.mark.parametrize(
    ("name", "position", "reason"),
    [
        ("with_large", 1, "it is a struct of 24 bytes, passed by value in memory"),
        ("with_odd", 1, "it is a struct of 9 bytes, passed by value in memory"),
        ("with_empty", 1, "it is empty"),
        ("with_float", 1, "it is a floating-point number, which no kernel register holds"),
        ("with_many", 5, "it is on the stack: 6 registers hold arguments"),
        ("with_many", 9, "it is on the stack: 6 registers hold arguments"),
        ("with_mixed", 1, "it has floating-point numbers"),
        ("with_mixed", 2, "an argument before it has floating-point numbers"),
    ],
)
def test_reasons(types: Btf, name: str, position: int, reason: str) -> None:
    assert passed_arguments(types, prototype(types, name), X86_64)[position] == Passed(refused=reason)


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        ("with_pair", Passed(("rax",))),
        ("returns_nothing", Passed()),
        ("returns_pair", Passed(refused="it is 16 bytes, of which one register holds half")),
        ("returns_large", Passed(refused="it is 24 bytes, which the function returns in memory")),
        ("returns_float", Passed(refused="it is a floating-point number, which no kernel register holds")),
    ],
)
def test_results(types: Btf, name: str, passed: Passed) -> None:
    assert passed_result(types, prototype(types, name), X86_64) == passed


def test_unknown_convention(types: Btf) -> None:
    unknown = Passed(refused="this machine's calling convention is not known")
    assert passed_arguments(types, prototype(types, "returns_large"), RISCV64) == (unknown, unknown)
    assert passed_result(types, prototype(types, "returns_large"), None) == unknown
