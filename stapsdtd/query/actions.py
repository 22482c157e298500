"""What to do with the hits that a subscription selects."""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.model import Capture


@dataclass(frozen=True, slots=True)
class Emit:
    """Send an event; the order of captures is that of its values."""

    captures: tuple[Capture, ...]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Add the hit to the row of its key, where it happens; see `Engine.why_not_aggregated`."""

    aggregation: Aggregation

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self.aggregation.captures


Action = Emit | Aggregate
"""A union that other actions can join; an engine that supports an action matches it where it plans a site."""
