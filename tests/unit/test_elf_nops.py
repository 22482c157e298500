from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from stapsdtd.elf.nops import Nop, nop_at
from stapsdtd.elf.notes import UnusableNoteError
from stapsdtd.model import LONGEST_NOP_BYTES
from tests.support import require

X86_NOPS = {
    1: ("90",),
    2: ("6690", "2e90"),
    3: ("0f1f00", "0f1fc0", "666690"),
    4: ("0f1f4000", "0f1f0400", "660f1f00"),
    5: ("0f1f440000", "660f1f4000", "2e0f1f4000", "66660f1f00", "660f1f0400", "6666666690"),
    6: ("660f1f440000",),
    7: ("0f1f8000000000", "0f1f0500000000"),
    8: ("0f1f840000000000", "0f1f042500000000"),
    9: ("660f1f840000000000",),
    10: ("662e0f1f840000000000", "66660f1f840000000000"),
    15: ("6666666666662e0f1f840000000000",),
}

CASES = [(length, code) for length, codes in X86_NOPS.items() for code in codes]


@pytest.mark.parametrize("architecture", ["x86-64", "x32", "i386"])
@pytest.mark.parametrize(("length", "code"), CASES)
def test_nops_of_x86(architecture: str, length: int, code: str) -> None:
    assert nop_at(architecture, bytes.fromhex(code)) == Nop(length)
    assert nop_at(architecture, bytes.fromhex(code).ljust(LONGEST_NOP_BYTES, b"\xc3")) == Nop(length)


@pytest.mark.parametrize("code", [code for _, code in CASES if len(code) > 2 and not code.endswith("90")])
def test_a_nop_that_is_cut_off_is_none(code: str) -> None:
    for length in range(len(code) // 2):
        with pytest.raises(UnusableNoteError, match="no nop"):
            nop_at("x86-64", bytes.fromhex(code)[:length])


def test_lengths_are_those_that_binutils_finds(tmp_path: Path) -> None:
    require(platform.machine() == "x86_64", "a disassembler for x86-64")
    code = bytes.fromhex("".join(code for _, code in CASES))
    (tmp_path / "nops").write_bytes(code)
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", "--insn-width=16", str(tmp_path / "nops")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = [line.split("\t") for line in shown if line.startswith(" ")]
    assert [len(fields[1].split()) for fields in lines] == [length for length, _ in CASES]
    assert all("nop" in fields[2] or "xchg" in fields[2] for fields in lines)


@pytest.mark.parametrize("length", range(1, 12))
def test_lengths_of_what_the_assembler_calls_a_nop(tmp_path: Path, length: int) -> None:
    require(platform.machine() == "x86_64", "an assembler for x86-64")
    (tmp_path / "nop.s").write_text(f".nops {length}\n")
    subprocess.run(["as", "--64", "-o", str(tmp_path / "nop.o"), str(tmp_path / "nop.s")], check=True)
    subprocess.run(
        ["objcopy", "-O", "binary", "-j", ".text", str(tmp_path / "nop.o"), str(tmp_path / "nop")], check=True
    )
    code = (tmp_path / "nop").read_bytes()
    assert len(code) == nop_at("x86-64", code).length == length


@pytest.mark.parametrize(
    ("architecture", "code", "length"),
    [
        ("aarch64", "1f2003d5", 4),
        ("arm", "00f020e3", 4),
        ("arm", "0000a0e1", 4),
        ("riscv64", "13000000", 4),
        ("riscv64", "0100", 2),
        ("s390x", "0700", 2),
        ("s390x", "0707", 2),
        ("s390x", "47000000", 4),
        ("ppc64le", "00000060", 4),
        ("ppc64", "60000000", 4),
        ("loongarch64", "00004003", 4),
    ],
)
def test_nops_of_others(architecture: str, code: str, length: int) -> None:
    assert nop_at(architecture, bytes.fromhex(code)) == Nop(length)
    assert nop_at(architecture, bytes.fromhex(code).ljust(LONGEST_NOP_BYTES, b"\xff")) == Nop(length)


@pytest.mark.parametrize(
    ("architecture", "code"),
    [
        ("x86-64", "c3"),
        ("x86-64", "cc"),
        ("x86-64", "f390"),  # pause
        ("x86-64", "4190"),  # xchg %r8,%rax
        ("x86-64", "0f1fc8"),  # 0f 1f /1
        ("x86-64", "0f0b"),
        ("x86-64", "66"),
        ("x86-64", "e890909090"),
        ("x86-64", "666666666666662e0f1f840000000000"[:30]),  # 16 bytes, more than an instruction has
        ("aarch64", "d503201f"),
        ("aarch64", "1f2003"),
        ("ppc64le", "60000000"),
        ("s390x", "0007"),
    ],
)
def test_other_instructions(architecture: str, code: str) -> None:
    shown = bytes.fromhex(code)[:8].hex(" ")
    with pytest.raises(UnusableNoteError) as refused:
        nop_at(architecture, bytes.fromhex(code))
    assert refused.value.reason == f"no nop at the location: bytes {shown}"


@pytest.mark.parametrize(("code", "length"), [("00bf", 2), ("c046", 2), ("aff30080", 4), ("00bf0020", 2)])
def test_thumbs_nops_are_known_and_refused(code: str, length: int) -> None:
    nop = nop_at("arm", bytes.fromhex(code))
    assert nop.length == length
    assert "Thumb code, in which the kernel has no uprobes" in str(nop.refused)


def test_no_bytes_are_no_nop() -> None:
    with pytest.raises(UnusableNoteError, match="no nop at the location: bytes missing"):
        nop_at("x86-64", b"")


def test_an_unknown_architecture_has_no_nop() -> None:
    with pytest.raises(
        UnusableNoteError, match="the nop of machine-8 is unknown, so a probe could corrupt the program"
    ):
        nop_at("machine-8", bytes(15))
