"""What to do with the hits that a subscription selects."""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.model import Capture


@dataclass(frozen=True, slots=True)
class Emit:
    """Send an event; the order of captures is that of its values."""

    captures: tuple[Capture, ...]


Action = Emit
"""A union that other actions can join; an engine that supports an action matches it where it plans a site."""
