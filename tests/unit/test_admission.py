"""How many files the subscriptions of a client, and those of all, may name."""

from __future__ import annotations

import os

import pytest

from stapsdtd.errors import LimitReachedError
from stapsdtd.model import ObjectKey
from stapsdtd.procs.named_files import Credentials, NamedFile
from stapsdtd.sessions.admission import FileLimits
from tests.unit.samples import sample_object, site

LIMITS = FileLimits(files=4, files_per_client=3, notes_per_client=5)


def named(notes: int = 1) -> NamedFile:
    parsed = sample_object(*(site(f"n{number}", number + 1) for number in range(notes))).parsed
    descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    return NamedFile(descriptor, "/app", 1, ObjectKey(1, 2, 3, 4), parsed, Credentials("anne", 1, frozenset({1}), 1))


def test_files_within_the_limits() -> None:
    LIMITS.check("anne", [named(), named(3)], [("anne", named()), ("bert", named(9))])
    LIMITS.check("anne", [], [("anne", named(9))] * 9)


@pytest.mark.parametrize(
    ("files", "held", "reason"),
    [
        ([1], ["anne"] * 3, "your subscriptions would name more than 3 files"),
        ([1, 5], [], "your subscriptions' files would have more than 5 notes"),
        ([5], ["anne"], "your subscriptions' files would have more than 5 notes"),
        ([1], ["bert"] * 4, "all subscriptions together would name more than 4 files"),
    ],
)
def test_files_beyond_a_limit(files: list[int], held: list[str], reason: str) -> None:
    with pytest.raises(LimitReachedError, match=f"^{reason}$"):
        LIMITS.check("anne", [named(notes) for notes in files], [(client, named()) for client in held])
