"""One subscription's aggregation: what its hits add up to, until a stream takes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

from stapsdtd.aggregate.aggregation import Aggregation, HitField
from stapsdtd.aggregate.grouping import group
from stapsdtd.aggregate.table import Table
from stapsdtd.events.batch import EventBatch
from stapsdtd.sessions.site_ids import KnownSite

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class Aggregator:
    """Adds events up in the daemon. `table` has the rows."""

    def __init__(self, aggregation: Aggregation, known_sites: KnownSites, max_bytes: int) -> None:
        """max_bytes: see `Table`."""
        self.aggregation = aggregation
        self.table = Table(aggregation, time.monotonic_ns(), max_bytes)
        self._known_sites = known_sites

    def add(self, batch: EventBatch) -> int:
        """Add events. Return how many had no room."""
        return self.table.add(group(self.aggregation, batch, self._site_value))

    def _site_value(self, site_id: int, field: HitField) -> str:
        known = self._known_sites([site_id]).get(site_id)
        if known is None:
            return ""
        site = known.capture.site
        match field:
            case HitField.PROVIDER:
                return site.provider
            case HitField.NAME:
                return site.name
            case HitField.MODULE:
                return os.path.basename(known.object.path)
            case _:
                return site.function or ""
