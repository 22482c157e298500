"""What tests need of each other's time, and of the host: for those, too, that have nothing of the daemon to import."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
TIME_FACTOR = float(os.environ.get("STAPSDTD_TIME_FACTOR", "1"))
"""How much longer things may take here than on a machine of its own; tests/vm has it set in its guests."""


def require(condition: object, what: str) -> None:
    """Skip where something is missing or, where nothing may be missing, fail."""
    if condition:
        return
    if os.environ.get("STAPSDTD_REQUIRE_KERNEL") == "1":
        pytest.fail(f"{what} is missing, and STAPSDTD_REQUIRE_KERNEL=1 wants it")
    pytest.skip(f"{what} is missing")


def wait_for(condition: Callable[[], T], what: str, seconds: float = 20) -> T:
    """Answer what condition answers once that is true; fail where it takes too long.

    seconds: as usual fewer than a lease lasts, whose end would disarm, too.
    """
    seconds *= TIME_FACTOR
    deadline = time.monotonic() + seconds
    # others may need the processor meanwhile, such as what is waited for
    pause_seconds = 0.002
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds} s for {what}")
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 0.02 * TIME_FACTOR)
