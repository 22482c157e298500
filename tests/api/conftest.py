from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.served import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    """A server with the defaults; modules that need another one have their own."""
    with served(tmp_path) as started:
        yield started
