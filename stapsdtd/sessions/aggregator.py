"""One subscription's aggregation: what its hits add up to, until a stream takes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from stapsdtd.aggregate.aggregation import SITE_FIELDS, Aggregation, HitField, Key, Row
from stapsdtd.aggregate.grouping import group
from stapsdtd.aggregate.table import Table
from stapsdtd.events.batch import EventBatch, ValueTable, unite
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.model import Capture
from stapsdtd.query.evaluate import site_text
from stapsdtd.query.expression import Field
from stapsdtd.sessions.site_ids import KnownSite

KnownSites = Callable[[Iterable[int]], Mapping[int, KnownSite]]


class Aggregator:
    """Takes events, which it adds up, and rows of the engine. `table` has the sums."""

    def __init__(self, aggregation: Aggregation, known_sites: KnownSites, max_bytes: int) -> None:
        """max_bytes: see `Table`."""
        self.table = Table(aggregation, time.monotonic_ns(), max_bytes)
        self._aggregation = aggregation
        self._known_sites = known_sites
        self._captures, self._columns = aggregation.captures, aggregation.columns
        self._computes = bool(aggregation.computed)
        self._site_fields = [
            (position, key)
            for position, key in enumerate(aggregation.keys)
            if isinstance(key, HitField) and key in SITE_FIELDS
        ]

    def add(self, batch: EventBatch) -> int:
        """Add events. Return how many had no room."""
        events = self._computed(batch) if self._computes else batch
        return self.table.add(group(self._aggregation, events, self._site_value))

    def _computed(self, batch: EventBatch) -> EventBatch:
        """Return events whose values are the aggregation's columns, instead of what these need."""
        sites = self._known_sites(batch.site_ids())
        tables: list[ValueTable] = []
        for site_id, positions, events in batch.by_site():
            known = sites[site_id]
            of_site = SiteEvents(known.capture.site, known.object.path, self._captures, events)
            columns = (
                of_site.captured(column) if isinstance(column, Capture) else column.column(of_site)
                for column in self._columns
            )
            tables.append(ValueTable(tuple(columns), positions))
        return replace(batch, tables=unite(tables))

    def add_rows(self, site_id: int, rows: Mapping[Key, Row]) -> int:
        """Add rows, as `RowSink.aggregated` takes them. Return how many hits had no room."""
        if not self._site_fields:
            return self.table.add(rows)
        values = [(position, self._site_value(site_id, field)) for position, field in self._site_fields]
        return self.table.add({_replaced(key, values): row for key, row in rows.items()})

    def _site_value(self, site_id: int, field: HitField) -> bytes:
        known = self._known_sites([site_id]).get(site_id)
        return site_text(Field(field.value), known.capture.site, known.object.path) if known else b""


def _replaced(key: Key, values: Sequence[tuple[int, bytes]]) -> Key:
    """Return a key with other values at some positions."""
    parts = list(key)
    for position, value in values:
        parts[position] = value
    return tuple(parts)
