"""See tests/churn.py; `pytest --churn-seconds=N --churn-seed=N` says for how long and with which numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.churn import churn
from tests.kernel.conftest import churn_options

pytestmark = [pytest.mark.kernel, pytest.mark.apart]


def test_everything_comes_and_goes_and_every_hit_is_accounted_for(
    tmp_path: Path, engine: str, request: pytest.FixtureRequest
) -> None:
    seconds, seed = churn_options(request.config)
    print(f"seed {seed}")
    churn(tmp_path, engine, seed, seconds / 2)
