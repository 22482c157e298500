"""Limit the size of a listing: a hostile file can hold half a million notes that share one long argument list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import replace

from stapsdtd.model import ObjectKey, Probe, Site
from stapsdtd.runtime.slices import Turn

MAX_PER_OBJECT = 60_000
"""Sites and arguments together, about 100 bytes each; longer names, and the numbers of many processes, count as more.
libjvm.so has 2,000.
"""
_BYTES = 100
_PID_BYTES = 4
MAX_TOTAL = 300_000


class ListingLimiter:
    """Trims probes to the sites that fit the limits per object and in total. left_out counts the sites dropped."""

    def __init__(self, max_per_object: int = MAX_PER_OBJECT, max_total: int = MAX_TOTAL) -> None:
        self._max_per_object = max_per_object
        self._left = max_total
        self._listed: Counter[ObjectKey] = Counter()
        self.left_out = 0

    def trimmed(self, probe: Probe) -> Generator[None, None, Probe | None]:
        """Return, in steps, a probe with the sites that fit; None if none does."""
        more = (len(probe.provider) + len(probe.name) + _PID_BYTES * len(probe.pids)) // _BYTES
        sites = []
        turn = Turn()
        for site in probe.sites:
            if self._fits(probe.object.key, site, more):
                sites.append(site)
                # a probe has its names and processes once
                more = 0
            if turn.is_over:
                yield
                turn.begin()
        self.left_out += len(probe.sites) - len(sites)
        return replace(probe, sites=tuple(sites)) if sites else None

    def _fits(self, key: ObjectKey, site: Site, more: int) -> bool:
        weight = 1 + len(site.arguments) + len(site.function or "") // _BYTES + more
        if self._listed[key] + weight > self._max_per_object or weight > self._left:
            return False
        self._listed[key] += weight
        self._left -= weight
        return True
