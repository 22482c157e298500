"""How much of the kernel's memory tables of hits may take."""

from __future__ import annotations

import threading
from collections import Counter

from stapsdtd.capture.bpf.pool import TableFullError

_MAX_BYTES = 256 << 20
_PER_OWNER_BYTES = _MAX_BYTES // 4


class TableMemory:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @property
    def byte_count(self) -> int:
        """Return about how much is taken."""
        with self._lock:
            return self._taken.total()

    def left(self, owner: str) -> int:
        """Return how much an owner may take."""
        with self._lock:
            return min(_PER_OWNER_BYTES - self._taken[owner], _MAX_BYTES - self._taken.total())

    def take(self, owner: str, byte_count: int) -> None:
        """Raises TableFullError."""
        with self._lock:
            if self._taken[owner] + byte_count > _PER_OWNER_BYTES:
                raise TableFullError(
                    f"aggregations and spans of {owner} take as much of the kernel's memory as one client's may"
                )
            if self._taken.total() + byte_count > _MAX_BYTES:
                raise TableFullError("aggregations and spans take as much of the kernel's memory as they may")
            self._taken[owner] += byte_count

    def give_back(self, owner: str, byte_count: int) -> None:
        with self._lock:
            self._taken[owner] -= byte_count
            if not self._taken[owner]:
                del self._taken[owner]
