"""One subscription's aggregation: what its hits add up to, until a stream takes it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from stapsdtd.aggregate.aggregation import SITE_FIELDS, Aggregation, HitField, Key, Row
from stapsdtd.aggregate.grouping import group
from stapsdtd.aggregate.table import Table
from stapsdtd.events.batch import EventBatch
from stapsdtd.sessions.site_ids import KnownSite

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class Aggregator:
    """Takes events, which it adds up, and rows of the engine. `table` has the sums."""

    def __init__(self, aggregation: Aggregation, known_sites: KnownSites, max_bytes: int) -> None:
        """max_bytes: see `Table`."""
        self.table = Table(aggregation, time.monotonic_ns(), max_bytes)
        self._aggregation = aggregation
        self._known_sites = known_sites
        self._site_fields = [
            (position, key)
            for position, key in enumerate(aggregation.keys)
            if isinstance(key, HitField) and key in SITE_FIELDS
        ]

    def add(self, batch: EventBatch) -> int:
        """Add events. Return how many had no room."""
        return self.table.add(group(self._aggregation, batch, self._site_value))

    def add_rows(self, site_id: int, rows: Mapping[Key, Row]) -> int:
        """Add rows, as `RowSink.aggregated` takes them. Return how many hits had no room."""
        if not self._site_fields:
            return self.table.add(rows)
        values = [(position, self._site_value(site_id, field).encode()) for position, field in self._site_fields]
        return self.table.add({_replaced(key, values): row for key, row in rows.items()})

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


def _replaced(key: Key, values: Sequence[tuple[int, bytes]]) -> Key:
    """Return a key with other values at some positions."""
    parts = list(key)
    for position, value in values:
        parts[position] = value
    return tuple(parts)
