"""Which nops the kernel rewrites: the program that tries it, what it tells, and what follows from that."""

from __future__ import annotations

import errno
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from stapsdtd.kernel import nop_trial
from stapsdtd.kernel.nop_trial import NOPS, REPORT, parse, program, run
from stapsdtd.kernel.nops import NopRewriting, judge, nop_feature
from tests.support import children, require

NOP5, NOP10 = NOPS[5], NOPS[10]
CALL = b"\xe8\x12\x34\x56\x78"
LEA_AND_CALL = b"\x48\x8d\x64\x24\x80" + CALL
NOWHERE = -524
REFUSED = -errno.EACCES
ANSWER = (-errno.ENOSYS).to_bytes(8, "little", signed=True)


def report(opened: tuple[int, int], five: bytes = NOP5, ten: bytes = NOP10) -> bytes:
    return REPORT.pack(*opened, five, ten)


def armed(nop: bytes) -> bytes:
    return b"\xcc" + nop[1:]


def test_the_program_is_what_its_listing_says(tmp_path: Path) -> None:
    require(platform.machine() == "x86_64", "an assembler for x86-64")
    assert nop_trial.__doc__ is not None
    listing = re.split(r"\n\n", nop_trial.__doc__)[1].split("0x400188")[1]
    (tmp_path / "program.s").write_text(listing + "\n")
    start = f"--section-start=.text={nop_trial.LOAD_VADDR + nop_trial.CODE_AT:#x}"
    for command in (
        ["as", "-o", "program.o", "program.s"],
        ["ld", start, "-e", "0", "-o", "program", "program.o"],
        ["objcopy", "-O", "binary", "-j", ".text", "program", "code"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "code").read_bytes() == nop_trial.CODE
    assert f"A program of {len(program(0))} bytes" in nop_trial.__doc__


def test_without_the_right_to_arm_it_still_tells_what_the_syscall_answers() -> None:
    require(platform.machine() == "x86_64", "x86-64")
    tried, answer = run("/nonexistent")
    assert tried == {}
    assert answer in {errno.ENXIO, errno.EPROTO, errno.ENOSYS}


def test_a_program_that_hangs_is_given_up() -> None:
    require(platform.machine() == "x86_64", "x86-64")
    forever = program(0)[: nop_trial.CODE_AT] + b"\xeb\xfe"  # jmp .
    before = children()
    assert nop_trial.output_of(forever, seconds=0.05) == b""
    assert children() == before


@pytest.mark.parametrize(
    ("output", "tried", "answer"),
    [
        (b"", {}, None),
        (report((3, 4))[:-1], {}, None),
        (report((3, 4), CALL, armed(NOP10)), {5: True, 10: False}, None),
        (report((3, 4), armed(NOP5), LEA_AND_CALL) + ANSWER, {5: False, 10: True}, errno.ENOSYS),
        (report((3, NOWHERE), armed(NOP5)) + ANSWER, {5: False, 10: False}, errno.ENOSYS),
        (report((REFUSED, REFUSED)) + ANSWER, {}, errno.ENOSYS),
        # opened, and not armed all the same
        (report((3, 4)) + ANSWER, {}, errno.ENOSYS),
        (report((3, 4), armed(NOP5), armed(NOP10)) + ANSWER[:7], {5: False, 10: False}, None),
        (report((3, 4), armed(NOP5), armed(NOP10)) + bytes(8), {5: False, 10: False}, None),
    ],
)
def test_what_the_program_wrote(output: bytes, tried: Mapping[int, bool], answer: int | None) -> None:
    assert parse(output) == (tried, answer)


NOBODY_KNOWS = NopRewriting(unknown=frozenset({5, 10}))
NONE = NopRewriting()
FIVE = NopRewriting(frozenset({5}))
TEN = NopRewriting(frozenset({10}))
BOTH = NopRewriting(frozenset({5, 10}))


@pytest.mark.parametrize(
    ("tried", "answer", "is_filtered", "found"),
    [
        # they agree
        ({5: False, 10: False}, errno.ENOSYS, False, NONE),
        ({5: True, 10: False}, errno.ENXIO, False, FIVE),
        ({5: False, 10: True}, errno.EPROTO, False, TEN),
        # only one of them says something
        ({}, errno.ENOSYS, False, NONE),
        ({}, errno.ENXIO, True, FIVE),
        ({}, errno.EPROTO, True, TEN),
        ({5: True, 10: False}, None, True, FIVE),
        ({5: False, 10: False}, errno.EPERM, True, NONE),
        ({5: True, 10: False}, errno.ENOSYS, True, FIVE),
        # they disagree
        ({5: True, 10: False}, errno.ENOSYS, False, FIVE),
        ({5: False, 10: False}, errno.ENXIO, False, FIVE),
        ({5: True, 10: False}, errno.EPROTO, False, BOTH),
        # nobody knows, or not all of it
        ({}, None, False, NOBODY_KNOWS),
        ({}, errno.EPERM, True, NOBODY_KNOWS),
        ({}, errno.ENOSYS, True, NOBODY_KNOWS),
        ({}, errno.EINVAL, False, NOBODY_KNOWS),
        ({5: True}, errno.ENOSYS, True, NopRewriting(frozenset({5}), frozenset({10}))),
    ],
)
def test_what_follows(tried: Mapping[int, bool], answer: int | None, is_filtered: bool, found: NopRewriting) -> None:
    assert judge(tried, answer, is_filtered=is_filtered) == found


@pytest.mark.parametrize("length", range(1, 16))
def test_what_is_rewritten_or_may_be_is_refused(length: int) -> None:
    assert NONE.why_not(length) is None
    for found, turns in ((BOTH, "turns"), (NOBODY_KNOWS, "may turn")):
        reason = found.why_not(length)
        if length in {5, 10}:
            assert reason is not None
            assert f"this kernel {turns} its {length}-byte nop into a call" in reason
        else:
            assert reason is None


def test_what_doctor_shows() -> None:
    for found in (NONE, FIVE, TEN, BOTH, NOBODY_KNOWS):
        feature = nop_feature(found)
        assert (feature.name, feature.required) == ("safe nops", False)
        assert feature.available is not bool(found.unknown)
        assert bool(feature.remedy) is bool(found.unknown)
        for length in (5, 10):
            assert (str(length) in feature.detail) is (found.why_not(length) is not None)
