"""What to do with the hits that a subscription selects."""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.aggregate.aggregation import Aggregation
from stapsdtd.model import Capture
from stapsdtd.query.expression import Condition
from stapsdtd.spans.span import Span


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


@dataclass(frozen=True, slots=True)
class BeginSpan:
    """Keep the hit until the end that has its key. All sites of a subscription have the same span.

    predicate: what is required of the hit for its pair to be wanted. The end of another one counts as filtered.
    """

    span: Span
    predicate: Condition | None = None

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self.span.start_captures


@dataclass(frozen=True, slots=True)
class EndSpan:
    """If a start waits for this hit, carry out another action, whose captures may be of the pair; see
    `spans.span.is_of_pair`. predicate: what is required of the pair; the end of another one counts as filtered.
    is_start_filtered: whether some starts have a predicate.
    """

    span: Span
    action: Emit | Aggregate
    predicate: Condition | None = None
    is_start_filtered: bool = False

    @property
    def is_filtered(self) -> bool:
        """Report whether some pairs may not be wanted."""
        return self.predicate is not None or self.is_start_filtered

    @property
    def captures(self) -> tuple[Capture, ...]:
        return self.action.captures


Action = Emit | Aggregate | BeginSpan | EndSpan
"""A union that other actions can join; an engine that supports an action matches it where it plans a site."""
