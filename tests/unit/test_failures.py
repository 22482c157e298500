"""Which failures of a run may have been accidents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.failures import main


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (["a"], None),
        (["a", "b", "c"], None),
        (["a", "b", "c", "d"], "4 tests failed; 3 at most are run again"),
        ([], "pytest failed, and no test did"),
    ],
)
def test_only_a_few_are_accidents(failed: list[str], message: str | None, tmp_path: Path) -> None:
    kept = tmp_path / "v" / "cache"
    kept.mkdir(parents=True)
    (kept / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    assert main(tmp_path) == message


def test_a_run_that_ended_early_is_none() -> None:
    assert main(Path("/nowhere")) == "pytest ended before it had run its tests"
