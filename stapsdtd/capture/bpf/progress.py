"""How far rings have been read, by which the records of several are put into one order of time.

ring 0   [1] [5] [6, being written] [7]     read until 5
ring 1   [2] [8]                            8 has to wait, since 6 and 7 come before it
"""

from __future__ import annotations

from stapsdtd.capture.bpf.rings import Records

HELD_UP_NS = 100_000_000
"""For how long other rings wait for a record that is being written, by a thread that the host does not let run."""


class Progress:
    """Of one ring."""

    def __init__(self, now_ns: int) -> None:
        self._until_ns = now_ns
        self._held_up_since_ns: int | None = None

    def until(self, records: Records, *, has_more: bool, is_held_up: bool, now_ns: int) -> int:
        """Return the time until which no record of the ring is missing, once these have been read.

        has_more: there are further ones. is_held_up: the next one is still being written. now_ns: from before the ring
        was looked at.
        """
        if not has_more and not is_held_up:
            self._until_ns, self._held_up_since_ns = now_ns, None
            return now_ns
        if len(records):
            # what is behind these is not earlier
            self._until_ns, self._held_up_since_ns = int(records["time_ns"][-1]), None
        if not is_held_up:
            return self._until_ns
        if self._held_up_since_ns is None:
            self._held_up_since_ns = now_ns
        return self._until_ns if now_ns - self._held_up_since_ns < HELD_UP_NS else now_ns
