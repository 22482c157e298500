"""A wall clock that a test sets, rather than the host's."""

from __future__ import annotations

from stapsdtd.runtime.wall_clock import Reading, WallClock

SECOND_NS = 1_000_000_000
OFFSET_NS = 1_700_000_000 * SECOND_NS


class SettableClock(WallClock):
    """It is OFFSET_NS ahead of the monotonic clock until it is set."""

    def __init__(self) -> None:
        self._reading = Reading(OFFSET_NS, 0, 1)
        super().__init__(lambda: self._reading)

    def set_by(self, by_ns: int, *, suspended_ns: int = 0) -> None:
        """Set it, after the host was suspended, and notice that."""
        offset_ns, suspended_before_ns, error_ns = self._reading
        self._reading = Reading(offset_ns + by_ns + suspended_ns, suspended_before_ns + suspended_ns, error_ns)
        self.look()
