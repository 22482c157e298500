"""How much is told at once: a hostile file can hold half a million notes that share one long argument list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from stapsdtd.model import ObjectKey, Probe, Site

MAX_OF_AN_OBJECT = 60_000
"""Sites and arguments together, some 100 bytes each. libjvm.so has 2,000."""
MAX_OF_ALL = 300_000


class ListingLimiter:
    """Tells probes with as many of their sites as there is room for, of each object and in all.

    left_out: how many of the others there were.
    """

    def __init__(self, of_an_object: int = MAX_OF_AN_OBJECT, of_all: int = MAX_OF_ALL) -> None:
        self._of_an_object = of_an_object
        self._left = of_all
        self._told: Counter[ObjectKey] = Counter()
        self.left_out = 0

    def of(self, probes: Iterable[Probe]) -> Iterator[Probe]:
        for probe in probes:
            sites = tuple(site for site in probe.sites if self._takes(probe.object.key, site))
            self.left_out += len(probe.sites) - len(sites)
            if sites:
                yield replace(probe, sites=sites)

    def _takes(self, key: ObjectKey, site: Site) -> bool:
        weight = 1 + len(site.arguments)
        if self._told[key] + weight > self._of_an_object or weight > self._left:
            return False
        self._told[key] += weight
        self._left -= weight
        return True
