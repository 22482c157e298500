"""Why a function cannot be attached to."""

from __future__ import annotations

import pytest

from stapsdtd.functions.attaching import Attachability, Shape, Symbols, Way, attachability
from tests.unit.kernel_types import BOTH_WAYS, NO_WAYS

USUAL = Symbols(1, is_traceable=True)


def test_usual_function() -> None:
    assert attachability(USUAL, Shape(), BOTH_WAYS) == Attachability(("fentry", "kprobe"), ())


def test_ways_that_the_host_lacks_are_not_the_functions_fault() -> None:
    assert attachability(USUAL, Shape(), NO_WAYS) == Attachability((), ())
    assert attachability(USUAL, Shape(), (Way("fentry", "refused"), Way("kprobe"))).ways == ("kprobe",)


def test_what_cannot_be_known_is_not_held_against_it() -> None:
    assert attachability(Symbols(1, is_traceable=None), Shape(), BOTH_WAYS).ways == ("fentry", "kprobe")


@pytest.mark.parametrize(
    ("symbols", "reason"),
    [
        (Symbols(0, is_traceable=None), "no code of it"),
        (Symbols(0, None, variants=("f.isra.0", "f.cold")), "the compiler made f.cold, f.isra.0 of it"),
        (Symbols(2, is_traceable=True), "2 functions have this name"),
        (Symbols(1, is_traceable=False), "ftrace cannot patch it: it is marked notrace"),
    ],
)
def test_reasons_against_every_way(symbols: Symbols, reason: str) -> None:
    found = attachability(symbols, Shape(), BOTH_WAYS)
    assert found.ways == ()
    assert reason in found.refused[0]


@pytest.mark.parametrize(
    ("symbols", "shape", "ways", "refused"),
    [
        (USUAL, Shape(is_variadic=True), ("kprobe",), "fentry: it takes a variable number of arguments"),
        (USUAL, Shape(returns_record=True), ("kprobe",), "fentry: it returns a struct or union"),
        (USUAL, Shape(untraceable=("a", "b")), ("kprobe",), "fentry: a, b not in registers"),
        (Symbols(1, True, is_blacklisted=True), Shape(), ("fentry",), "kprobe: the kernel's blacklist has it"),
    ],
)
def test_reasons_against_one_way(symbols: Symbols, shape: Shape, ways: tuple[str, ...], refused: str) -> None:
    assert attachability(symbols, shape, BOTH_WAYS) == Attachability(ways, (refused,))
