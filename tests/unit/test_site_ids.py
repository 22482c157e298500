from __future__ import annotations

import pytest

from stapsdtd.model import Address, BuiltIn, Capture, Constant, Memory, Operand, Register, SiteCapture, StartArgument
from stapsdtd.sessions.site_ids import KnownSite, SiteIds
from tests.unit.samples import argument, captured, sample_object, site

A = site("a", 1)
STAYING = sample_object(A)


def test_only_so_many_sites_of_gone_objects_are_remembered() -> None:
    ids = SiteIds(lambda *_: None, retired_kept=2)
    ids.arm([ids.id_of(STAYING, captured(A))])
    for inode in range(2, 8):
        site_id = ids.id_of(sample_object(A, inode=inode), captured(A))
        ids.arm([site_id])
        ids.retire([site_id], next_seq=1)
        ids.forget_unused(first_kept=1)
    assert sorted(ids.known(range(1, 10))) == [1, 6, 7]
    assert ids.armed == 1
    assert ids.id_of(STAYING, captured(A)) == 1
    assert ids.id_of(sample_object(A, inode=7), captured(A)) == 7
    assert ids.id_of(sample_object(A, inode=2), captured(A)) == 8


def test_site_that_is_about_to_be_armed_is_not_forgotten() -> None:
    """Its events may come before anyone is told that it is armed."""
    now = 0.0
    ids = SiteIds(lambda *_: None, clock=lambda: now, retired_kept=0)
    site_id = ids.id_of(STAYING, captured(A))
    ids.retire([site_id], next_seq=1)
    now += 100
    assert ids.id_to_arm(STAYING, captured(A)) == site_id
    for inode in range(2, 8):
        ids.id_of(sample_object(A, inode=inode), captured(A))
        ids.forget_unused(first_kept=1)
    assert sorted(ids.known(range(1, 10))) == [site_id]
    ids.retire([site_id], next_seq=1)
    now += 100
    ids.forget_unused(first_kept=1)
    assert ids.known([site_id]) == {}


HOLDER, TARGET = "the memory that holds it", "the memory it points to"
EITHER = "the memory that holds it, or memory it points to,"
UNREAD = "could not be read"
REMOVED = "the cgroup was removed, or the server cannot look it up (CAP_DAC_READ_SEARCH)"
TEXT, BYTES, NUMBER = Capture(0, is_string=True), Capture(0, max_bytes=8, is_buffer=True), Capture(0)
MEMORY = Memory("rbp", displacement=-8)


def reason(capture: Capture, operand: Operand, why_not: str | None = None) -> str:
    there = site("a", 1, [argument(operand)])
    return KnownSite(sample_object(there), SiteCapture(there, (capture,)), lambda *_: why_not).why_missing(0)


@pytest.mark.parametrize(
    ("operand", "number", "target"),
    [
        (Register("rax"), "", f"{TARGET} {UNREAD}"),
        (Constant(5), "", f"{TARGET} {UNREAD}"),
        (Address("rip", 8, "x"), "", f"{TARGET} {UNREAD}"),
        (MEMORY, f"{HOLDER} {UNREAD}", f"{EITHER} {UNREAD}"),
    ],
)
def test_reasons_fit_the_operand(operand: Operand, number: str, target: str) -> None:
    assert reason(NUMBER, operand) == number
    assert reason(TEXT, operand) == target
    assert reason(BYTES, operand) == target
    for capture in (NUMBER, TEXT, BYTES):
        assert reason(capture, operand, "the engine cannot") == "the engine cannot"


@pytest.mark.parametrize("subject", BuiltIn)
def test_reasons_of_what_is_no_argument(subject: BuiltIn) -> None:
    expected = REMOVED if subject in {BuiltIn.CGROUP, BuiltIn.CONTAINER} else ""
    assert reason(Capture(subject), MEMORY) == expected


def test_reasons_of_starts() -> None:
    when = f"{UNREAD} when the span began"
    assert reason(Capture(StartArgument(0)), Register("rax")) == f"{HOLDER} {when}"
    assert reason(Capture(StartArgument(0), is_string=True), Register("rax")) == f"{EITHER} {when}"
