"""Bounds what a client's probes may cost processes that the client may not trace.

Every process that maps a library takes a trap at each hit, whoever had its probes armed. A client whose role bounds
such hits loses the object with the most of them, and cannot get it back at once by subscribing again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stapsdtd.model import ObjectKey

_FIRST_SECONDS = 30.0
_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Excess:
    """An object that is barred for some seconds. rate: all foreign hits a second of the client. limit: its role's."""

    key: ObjectKey
    rate: int
    limit: int
    seconds: float

    @property
    def reason(self) -> str:
        return (
            f"cost other users' processes {self.rate:,} hits/s; your role allows {self.limit:,}; "
            f"armed again after {self.seconds:.0f} s"
        )


@dataclass(slots=True)
class _Bar:
    excess: Excess
    until: float


class ForeignBounds:
    """Called from one thread. exceeded: how often an object was barred. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._judged_at = clock()
        self._bars: dict[tuple[str, ObjectKey], _Bar] = {}
        self.exceeded = 0

    def judge(self, hits: Mapping[tuple[str, ObjectKey], int], limits: Mapping[str, int]) -> list[tuple[str, Excess]]:
        """Bar objects, those with the most hits first, until each client is within its limit. Return them by name.

        hits: by client and object, since the last call. limits: hits a second, of the clients that have a limit.
        """
        now = self._clock()
        seconds, self._judged_at = max(now - self._judged_at, 0.001), now
        totals: Counter[str] = Counter()
        for (client, _), count in hits.items():
            totals[client] += count
        excesses = []
        for (client, key), count in sorted(hits.items(), key=lambda item: item[1], reverse=True):
            limit = limits.get(client)
            rate = int(totals[client] / seconds)
            if limit is not None and rate > limit:
                totals[client] -= count
                excesses.append((client, self._bar(client, key, rate, limit, now)))
        return excesses

    def _bar(self, client: str, key: ObjectKey, rate: int, limit: int, now: float) -> Excess:
        earlier = self._bars.get((client, key))
        seconds = _FIRST_SECONDS if earlier is None else min(2 * earlier.excess.seconds, _LONGEST_SECONDS)
        excess = Excess(key, rate, limit, seconds)
        self._bars[client, key] = _Bar(excess, now + seconds)
        self.exceeded += 1
        return excess

    def why_not(self, client: str, key: ObjectKey) -> str | None:
        """Return why the client may not have the object's probes now, or None if it may."""
        bar = self._bars.get((client, key))
        return None if bar is None or bar.until <= self._clock() else bar.excess.reason

    def forget(self) -> None:
        """Drop bars that ended longer ago than they lasted plus an hour; the next one starts small again."""
        now = self._clock()
        self._bars = {
            key: bar for key, bar in self._bars.items() if bar.until + bar.excess.seconds + _LONGEST_SECONDS > now
        }
