"""Which nops the kernel rewrites: the program that tries it, what it tells, and what follows from that."""

from __future__ import annotations

import errno
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from stapsdtd.kernel import nop_trial
from stapsdtd.kernel.nop_trial import ENOTSUPP, NOPS, PASSES, REPORT, arm_nothing, parse, program, run
from stapsdtd.kernel.nops import NopRewriting, judge, nop_feature
from tests.support import children, is_dead, require, wait_for

NOP5, NOP10 = NOPS[5], NOPS[10]
CALL = b"\xe8\x12\x34\x56\x78"
LEA_AND_CALL = b"\x48\x8d\x64\x24\x80" + CALL
ANSWER = (-errno.ENOSYS).to_bytes(8, "little", signed=True)


def reports(five: bytes = NOP5, ten: bytes = NOP10, passes: int = PASSES) -> bytes:
    """Before the nops are armed, and after each pass."""
    return REPORT.pack(NOP5, NOP10) + REPORT.pack(five, ten) * passes


def armed(nop: bytes) -> bytes:
    return b"\xcc" + nop[1:]


def test_the_program_is_what_its_listing_says(tmp_path: Path) -> None:
    require(platform.machine() == "x86_64", "an assembler for x86-64")
    assert nop_trial.__doc__ is not None
    listing = re.split(r"\n\n", nop_trial.__doc__)[1].split("0x400078\n")[1]
    (tmp_path / "program.s").write_text(listing + "\n")
    start = f"--section-start=.text={nop_trial.LOAD_VADDR + nop_trial.CODE_AT:#x}"
    for command in (
        ["as", "-o", "program.o", "program.s"],
        ["ld", start, "-e", "0", "-o", "program", "program.o"],
        ["objcopy", "-O", "binary", "-j", ".text", "program", "code"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "code").read_bytes() == nop_trial.CODE
    assert f"A program of {len(program())} bytes" in nop_trial.__doc__


def test_without_the_right_to_arm_it_still_tells_what_the_syscall_answers() -> None:
    require(platform.machine() == "x86_64", "x86-64")
    tried, answer = run(arm_nothing)
    assert tried == {}
    assert answer in {errno.ENXIO, errno.EPROTO, errno.ENOSYS}


def test_a_program_that_hangs_is_given_up() -> None:
    require(platform.machine() == "x86_64", "x86-64")
    before = children()
    forever = program()[: nop_trial.CODE_AT] + b"\xeb\xfe"  # jmp .
    began: list[str] = []
    assert nop_trial.output_of(forever, 0.05, began.append) == b""
    assert (began, children()) == ([], before)


def test_nops_are_armed_after_the_first_report_and_before_a_pass() -> None:
    require(platform.machine() == "x86_64", "x86-64")
    found: list[bytes] = []

    def look(path: str) -> None:
        found.append(Path(path).read_bytes())

    output = nop_trial.output_of(program(), 5, look)
    assert found == [program()]
    assert output[: (1 + PASSES) * REPORT.size] == reports()
    assert parse(output, {})[0] == {}


def test_program_ends_with_its_parent() -> None:
    """Whoever armed it for a trial may be killed."""
    require(platform.machine() == "x86_64", "x86-64")
    script = """
import os, signal
from stapsdtd.kernel import nop_trial
def kill(path):
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    print(children.split()[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
nop_trial.output_of(nop_trial.program(), 20, kill)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30)
    pid = int(done.stdout)
    wait_for(lambda: is_dead(pid) or not Path(f"/proc/{pid}").exists(), "the program to end")


@pytest.mark.parametrize(
    ("output", "refused", "tried", "answer"),
    [
        (b"", {}, {}, None),
        (reports(passes=0), {}, {}, None),
        (reports(CALL, armed(NOP10)), {}, {5: True, 10: False}, None),
        (reports(armed(NOP5), LEA_AND_CALL) + ANSWER, {}, {5: False, 10: True}, errno.ENOSYS),
        # killed for the call that a nop became: what did not is not known to be safe
        (reports(CALL, armed(NOP10), passes=1), {}, {5: True}, None),
        (reports(armed(NOP5), armed(NOP10), passes=PASSES - 1), {}, {}, None),
        (reports(armed(NOP5), armed(NOP10))[:-1], {}, {}, None),
        # it was rewritten at a later hit
        (reports(armed(NOP5), armed(NOP10), 1) + REPORT.pack(CALL, armed(NOP10)) * 2, {}, {5: True, 10: False}, None),
        (reports(armed(NOP5)) + ANSWER, {10: ENOTSUPP}, {5: False, 10: False}, errno.ENOSYS),
        (reports() + ANSWER, {5: errno.EACCES, 10: errno.EACCES}, {}, errno.ENOSYS),
        # opened, and not armed all the same
        (reports() + ANSWER, {}, {}, errno.ENOSYS),
        (reports(armed(NOP5), armed(NOP10)) + ANSWER[:7], {}, {5: False, 10: False}, None),
        (reports(armed(NOP5), armed(NOP10)) + bytes(8), {}, {5: False, 10: False}, None),
    ],
)
def test_what_the_program_wrote(
    output: bytes, refused: Mapping[int, int], tried: Mapping[int, bool], answer: int | None
) -> None:
    assert parse(output, refused) == (tried, answer)


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
