"""What events tell besides their probe's arguments: fields, some of them computed from what was captured.

asked for:  uid, arg1 - arg0
captured:   str(arg2)  │ uid  arg1  arg0       the first one is the selector's
delivered:  str(arg2)  │ uid  arg1 - arg0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stapsdtd.events.batch import EventBatch, ValueTable, unite
from stapsdtd.events.columns import Numbers, ValueColumn
from stapsdtd.events.site_events import SiteEvents
from stapsdtd.model import BuiltIn, Capture, Site, SiteCapture
from stapsdtd.query.sources import ExpressionSource

if TYPE_CHECKING:
    from stapsdtd.sessions.site_ids import KnownSite


@dataclass(frozen=True, slots=True)
class ComputedField:
    """text: as the client wrote it."""

    text: str
    source: ExpressionSource


Field = BuiltIn | ComputedField
Delivered = Capture | ComputedField


def captured(fields: Sequence[Field], site: Site) -> tuple[Capture, ...]:
    """Return what has to be captured at a site for fields. What cannot be computed there needs nothing."""
    wanted: list[Capture] = []
    for field in fields:
        if isinstance(field, BuiltIn):
            wanted.append(Capture(field))
        elif field.source.why_not_at(site) is None:
            wanted += field.source.captures
    return tuple(dict.fromkeys(wanted))


def delivered(fields: Sequence[Field], wanted: SiteCapture) -> tuple[Delivered, ...]:
    """Return what the values of a site's events are. wanted: what is captured there."""
    if wanted.listed is None:
        return wanted.captures
    asked = (Capture(field) if isinstance(field, BuiltIn) else field for field in fields)
    return *wanted.captures[: wanted.listed], *asked


class FieldComputer:
    """Makes the values that are delivered of those that were captured."""

    def __init__(
        self, fields: Sequence[Field], known_sites: Callable[[Iterable[int]], Mapping[int, KnownSite]]
    ) -> None:
        self._fields = fields
        self._known_sites = known_sites

    def computed(self, batch: EventBatch) -> EventBatch:
        sites = self._known_sites(batch.site_ids())
        tables: list[ValueTable] = []
        for site_id, positions, events in batch.by_site():
            known = sites[site_id]
            of_site = SiteEvents(known.capture.site, known.object.path, known.capture.captures, events)
            listed = events.tables[0].columns[: known.capture.listed]
            columns = (_column(field, of_site) for field in self._fields)
            tables.append(ValueTable((*listed, *columns), positions))
        return replace(batch, tables=unite(tables))


def _column(field: Field, events: SiteEvents) -> ValueColumn:
    if isinstance(field, BuiltIn):
        return events.captured(Capture(field))
    if field.source.why_not_at(events.site) is None:
        return field.source.column(events)
    count = len(events.batch)
    return Numbers(np.zeros(count, np.int64), np.ones(count, np.bool_))
