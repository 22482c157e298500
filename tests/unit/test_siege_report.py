"""What `./dev siege` holds a row against."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.siege.bystander import CALLS, Round
from tests.siege.report import failures
from tests.siege.siege import Gained, Row

_FIRED = 100


def row(of_each: float, **told: object) -> Row:
    """Each call took so long, and every event came."""
    well = Round(
        seconds={call: [of_each] * 10 for call in CALLS},
        fired=_FIRED,
        received=_FIRED,
        accounted={"fired": _FIRED, "delivered": _FIRED, "lost": 0},
    )
    return Row(
        name="attack",
        round=replace(well, **told),  # type: ignore[arg-type]
        gained=Gained(Counter(), Counter(), {}),
        peak_kib=0,
        cpu_share=0.0,
        log_bytes=0,
        slices={},
        problems=[],
        has_settled=True,
    )


QUIET = row(0.010)


def test_calls_within_the_bound_hold() -> None:
    assert failures(row(0.0349), QUIET) == []


def test_each_call_beyond_the_bound_fails() -> None:
    found = failures(row(0.0351), QUIET)
    assert [text.partition(":")[0] for text in found] == list(CALLS)


def test_single_long_wait_of_few_fails() -> None:
    assert len(failures(row(0.01, seconds={call: [0.01, 5.0, 0.01] for call in CALLS}), QUIET)) == len(CALLS)


def test_call_that_was_never_answered_fails() -> None:
    assert len(failures(row(0.01, seconds={}), QUIET)) == len(CALLS)


@pytest.mark.parametrize(
    "told",
    [
        {"received": _FIRED - 1},
        {"accounted": {"fired": _FIRED, "delivered": _FIRED - 1, "lost": 1}},
        {"accounted": {}},
        {"miscounted": 1},
        {"foreign": 1},
        {"failures": Counter({"list: ServerTimeoutError": 1})},
    ],
)
def test_whatever_is_lost_wrong_or_of_others_fails(told: dict[str, object]) -> None:
    assert len(failures(row(0.01, **told), QUIET)) == 1


def test_problems_fail() -> None:
    assert failures(replace(QUIET, problems=["the daemon ended"]), QUIET) == ["the daemon ended"]
