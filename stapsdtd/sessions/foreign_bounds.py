"""What a client's probes may cost processes that it does not see.

Every process that maps a library pays a trap a hit, whoever has its probes armed. A client whose role bounds that loses
what costs the most, and does not get it back at once by asking anew.
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
    """An object whose probes a client may not have for some seconds. rate: what its probes cost others at last."""

    key: ObjectKey
    rate: int
    most: int
    seconds: float

    @property
    def reason(self) -> str:
        return (
            f"cost other users' processes {self.rate:,} hits/s; your role allows {self.most:,}; "
            f"armed again after {self.seconds:.0f} s"
        )


@dataclass(slots=True)
class _Bar:
    excess: Excess
    until: float


class ForeignBounds:
    """One thread's. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._bars: dict[tuple[str, ObjectKey], _Bar] = {}
        self.exceeded = 0

    def look(self, hits: Mapping[tuple[str, ObjectKey], int], bounds: Mapping[str, int]) -> list[tuple[str, Excess]]:
        """Return what is to be disarmed of which client, the dearest first, until the rest is within its bound.

        hits: by client and object, since the last call. bounds: a second, of the clients that have one.
        """
        now = self._clock()
        seconds, self._looked_at = max(now - self._looked_at, 0.001), now
        totals: Counter[str] = Counter()
        for (client, _), count in hits.items():
            totals[client] += count
        found = []
        for (client, key), count in sorted(hits.items(), key=lambda item: item[1], reverse=True):
            most = bounds.get(client)
            rate = int(totals[client] / seconds)
            if most is not None and rate > most:
                totals[client] -= count
                found.append((client, self._bar(client, key, rate, most, now)))
        return found

    def _bar(self, client: str, key: ObjectKey, rate: int, most: int, now: float) -> Excess:
        earlier = self._bars.get((client, key))
        seconds = _FIRST_SECONDS if earlier is None else min(2 * earlier.excess.seconds, _LONGEST_SECONDS)
        excess = Excess(key, rate, most, seconds)
        self._bars[client, key] = _Bar(excess, now + seconds)
        self.exceeded += 1
        return excess

    def why_not(self, client: str, key: ObjectKey) -> str | None:
        """Return why the client may not have the object's probes now; None where it may."""
        bar = self._bars.get((client, key))
        return None if bar is None or bar.until <= self._clock() else bar.excess.reason

    def forget(self) -> None:
        """What has been over for as long as it lasted, and an hour, counts no more."""
        now = self._clock()
        self._bars = {
            which: bar for which, bar in self._bars.items() if bar.until + bar.excess.seconds + _LONGEST_SECONDS > now
        }
