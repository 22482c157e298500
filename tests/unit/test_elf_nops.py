from __future__ import annotations

import pytest

from stapsdtd.elf.nops import why_not_nop


@pytest.mark.parametrize(
    ("architecture", "code"),
    [
        ("x86-64", "90"),
        ("x86-64", "90c3"),
        ("x86-64", "6690"),
        ("x86-64", "0f1f00"),
        ("x86-64", "0f1f4000"),
        ("x86-64", "0f1f440000"),
        ("x86-64", "660f1f440000"),
        ("x86-64", "0f1f80000000000f"),
        ("x86-64", "66662e0f1f840000000000"),
        ("i386", "90"),
        ("x32", "0f1f00"),
        ("aarch64", "1f2003d5"),
        ("arm", "00f020e3"),
        ("arm", "0000a0e1"),
        ("riscv64", "13000000"),
        ("riscv64", "0100"),
        ("s390x", "0700"),
        ("s390x", "0707"),
        ("s390x", "47000000"),
        ("ppc64le", "00000060"),
        ("ppc64", "60000000"),
        ("loongarch64", "00004003"),
    ],
)
def test_nops(architecture: str, code: str) -> None:
    assert why_not_nop(architecture, bytes.fromhex(code)) is None


@pytest.mark.parametrize(
    ("architecture", "code"),
    [
        ("x86-64", "c3"),
        ("x86-64", "cc"),
        ("x86-64", "f390"),  # pause
        ("x86-64", "4190"),  # xchg %r8,%rax
        ("x86-64", "0f1fc8"),  # 0f 1f /1
        ("x86-64", "0f1f"),
        ("x86-64", "0f0b"),
        ("x86-64", "66"),
        ("x86-64", "e890909090"),
        ("aarch64", "d503201f"),
        ("aarch64", "1f2003"),
        ("arm", "c046"),  # Thumb: the kernel would write an ARM breakpoint
        ("arm", "00bf"),
        ("ppc64le", "60000000"),
        ("s390x", "0007"),
    ],
)
def test_other_instructions(architecture: str, code: str) -> None:
    shown = bytes.fromhex(code).hex(" ")
    assert why_not_nop(architecture, bytes.fromhex(code)) == f"no nop at the location: bytes {shown}"


def test_no_bytes_are_no_nop() -> None:
    assert why_not_nop("x86-64", b"") == "no nop at the location: bytes missing"


def test_an_unknown_architecture_has_no_nop() -> None:
    assert why_not_nop("machine-8", bytes(15)) == (
        "what a nop is on machine-8 is not known, so a probe there could do harm"
    )
