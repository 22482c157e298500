"""6,000 mutated objects and some that are built to hurt; `./dev fuzz` takes more."""

from __future__ import annotations

import io
import json
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import adversarial
from tests.fuzz.adversarial import Outcome
from tests.fuzz.checks import PeakMemory, check
from tests.fuzz.mutations import Mutator, Sample, samples
from tests.fuzz.run import run
from tests.support import ROOT

CHUNK = 2000
RANDOM_SEED = secrets.randbelow(1 << 32)
MAX_GROWTH_BYTES = 256 << 20

BUGS: dict[str, str] = {}
"""What breaks today, by adversarial case."""


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: sample.name)
def test_what_is_mutated_is_right(sample: Sample) -> None:
    parsed = check(io.BytesIO(sample.image))
    assert parsed is not None
    assert bool(parsed.sites) == (sample.name != "gcc-object")
    assert sample.texts
    assert {"header", "sections", "notes", "symbols", "strings"} <= sample.fields.keys()


def test_a_case_can_be_repeated() -> None:
    assert [Mutator(5).case(number) for number in range(20)] == [Mutator(5).case(number) for number in range(20)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, pytest.param(RANDOM_SEED, id="random")])
def test_mutations(seed: int, tmp_path: Path) -> None:
    print(f"seed {seed}")
    samples()
    peak = PeakMemory()
    tally = run(seed, range(CHUNK), tmp_path)
    assert peak.growth_bytes() < MAX_GROWTH_BYTES
    assert tally["with sites"] > CHUNK // 4
    assert tally["unreadable"] > CHUNK // 50


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of a process whose threads and memory are its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--adversarial"], check=True, capture_output=True, cwd=ROOT
    )
    found: dict[str, Outcome] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=BUGS[name])) if name in BUGS else name
        for name in adversarial.CASES
    ],
)
def test_adversarial(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name]["error"] == ""
