"""Bounds what a client's probes may cost processes that the client may not trace.

Every process that maps a library takes a trap at each hit, whoever had its probes armed. A client whose role bounds
such hits is confined to its own processes in the object with the most of them, for a while, and cannot change that by
subscribing again. If that is not enough, it loses the object.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stapsdtd.model import ObjectKey

_FIRST_SECONDS = 30.0
_LONGEST_SECONDS = 3600.0
_TAKES_EFFECT_SECONDS = 3.0
"""Hits that were counted before the object was confined say nothing of those since."""


@dataclass(frozen=True, slots=True)
class Excess:
    """An object that is confined for some seconds. rate: all foreign hits a second of the client. limit: its role's.
    is_refused: it cost too much though it was armed in the client's own processes alone.
    """

    key: ObjectKey
    rate: int
    limit: int
    seconds: float
    is_refused: bool = False

    @property
    def why_refused(self) -> str:
        return f"{self._cost}; armed again after {self.seconds:.0f} s"

    @property
    def why_confined(self) -> str:
        return f"{self._cost}; armed in those again after {self.seconds:.0f} s"

    @property
    def _cost(self) -> str:
        return f"cost other users' processes {self.rate:,} hits/s; your role allows {self.limit:,}"


@dataclass(slots=True)
class _Bar:
    excess: Excess
    since: float

    @property
    def until(self) -> float:
        return self.since + self.excess.seconds


class ForeignBounds:
    """Called from one thread. exceeded: how often an object was confined, or refused. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._judged_at = clock()
        self._bars: dict[tuple[str, ObjectKey], _Bar] = {}
        self.exceeded = 0

    def judge(self, hits: Mapping[tuple[str, ObjectKey], int], limits: Mapping[str, int]) -> list[tuple[str, Excess]]:
        """Confine objects, those with the most hits first, until each client is within its limit. Return them by name.

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
                if excess := self._bar(client, key, rate, limit, now):
                    excesses.append((client, excess))
        return excesses

    def _bar(self, client: str, key: ObjectKey, rate: int, limit: int, now: float) -> Excess | None:
        earlier = self._bars.get((client, key))
        if earlier is not None and now - earlier.since < _TAKES_EFFECT_SECONDS:
            return None
        seconds = _FIRST_SECONDS if earlier is None else min(2 * earlier.excess.seconds, _LONGEST_SECONDS)
        excess = Excess(key, rate, limit, seconds, is_refused=earlier is not None and now < earlier.until)
        self._bars[client, key] = _Bar(excess, now)
        self.exceeded += 1
        return excess

    def excess(self, client: str, key: ObjectKey) -> Excess | None:
        """Return why the client may have the object's probes in its own processes at most; None if it may in all."""
        bar = self._bars.get((client, key))
        return None if bar is None or bar.until <= self._clock() else bar.excess

    def forget(self) -> None:
        """Drop bars that ended longer ago than they lasted plus an hour; the next one starts small again."""
        now = self._clock()
        self._bars = {
            key: bar for key, bar in self._bars.items() if bar.until + bar.excess.seconds + _LONGEST_SECONDS > now
        }
