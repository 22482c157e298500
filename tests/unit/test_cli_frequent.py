"""Which probes selectors with globs leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from stapsdtd.cli.frequent import hint, left_out

LINES_AND_CALLS = ["python:function__entry", "python:function__return", "python:line"]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (["python:*"], LINES_AND_CALLS),
        (["pyth*:*e"], ["python:line"]),
        (["python4711:::*"], LINES_AND_CALLS),
        (["python:*", "python:line"], LINES_AND_CALLS[:2]),
        (["python:*", "ruby:line"], LINES_AND_CALLS),
        (["python:*", "line"], LINES_AND_CALLS[:2]),
        (["*:function-entry"], []),
        (["postgresql:*", "python:gc__*", "python:line"], []),
        (["python:*(arg0:wrong)"], []),
    ],
)
def test_globs_leave_out_what_is_not_named(selectors: list[str], expected: list[str]) -> None:
    assert left_out(selectors) == expected


def test_no_selector_means_all_probes() -> None:
    assert {*LINES_AND_CALLS, "ruby:method__entry", "php:function__entry", "hotspot:method__entry"} <= {*left_out(())}


def test_own_files_say_what_is_frequent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAPSDT_SIGNATURES", str(tmp_path))
    (tmp_path / "shop.toml").write_text(
        'provider = "shop"\nsource = "ours"\nversions = "1"\n'
        '[[probes]]\nname = "step"\ntext = "each"\nfrequent = true\n[[probes]]\nname = "sale"\ntext = "few"\n'
    )
    assert left_out(["shop:*"]) == ["shop:step"]


def test_only_those_of_providers_that_are_there_are_told() -> None:
    assert hint(LINES_AND_CALLS, ["ruby"]) == ""
    assert hint(["python:line", "ruby:raise"], ["python"]) == (
        "left out, since they fire at each line or call: python:line; name them, or use --all"
    )
