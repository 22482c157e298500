"""The last look at a site before it is armed: real files, and what is in them then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.sessions.instructions import why_not_armed
from tests.unit.samples import site

OFFSET = 0x20
NOPS = NopRewriting(rewritten=frozenset({5}))


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def why(descriptor: int, code: str, nop_bytes: int) -> str | None:
    os.pwrite(descriptor, bytes.fromhex(code), OFFSET)
    return why_not_armed(descriptor, "x86-64", site(offset=OFFSET, nop_bytes=nop_bytes), NOPS)


@pytest.mark.parametrize(("code", "nop_bytes"), [("90", 1), ("900f1f440000", 1), ("6690", 2), ("660f1f440000", 6)])
def test_what_is_as_it_was_is_armed(descriptor: int, code: str, nop_bytes: int) -> None:
    assert why(descriptor, code, nop_bytes) is None


def test_what_the_kernel_rewrites_is_not() -> None:
    reason = why_not_armed(-1, "x86-64", site(nop_bytes=5), NOPS)
    assert reason is not None
    assert reason == NOPS.why_not(5)


@pytest.mark.parametrize(
    ("code", "nop_bytes", "reason"),
    [
        ("0f1f440000", 1, "a nop of 5 bytes instead of 1"),
        ("90", 6, "a nop of 1 bytes instead of 6"),
        ("c3", 1, "no nop at the location: bytes c3"),
        ("", 1, "no nop at the location: bytes missing"),
    ],
)
def test_what_changed_since_is_not(descriptor: int, code: str, nop_bytes: int, reason: str) -> None:
    assert why(descriptor, code, nop_bytes) == f"the file changed since it was read: {reason}"


def test_what_cannot_be_read_is_not(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        reason = why_not_armed(folder, "x86-64", site(), NOPS)
    finally:
        os.close(folder)
    assert reason == "read the file: Is a directory; a directory has taken its place"
