"""Events of one site, and what is the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.events.batch import EventBatch
from stapsdtd.events.columns import ValueColumn
from stapsdtd.model import Capture, Site


@dataclass(frozen=True, slots=True)
class SiteEvents:
    """Events of one site. captures: what their values are, in order. path: of the site's file."""

    site: Site
    path: str
    captures: Sequence[Capture]
    batch: EventBatch

    def captured(self, capture: Capture) -> ValueColumn:
        return self.batch.tables[0].columns[self.captures.index(capture)]
