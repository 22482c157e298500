"""What objects take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def allocated_bytes(work: Callable[[], None]) -> int:
    """Return how much of the memory that work allocates is still in use after it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
