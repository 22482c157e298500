"""What is to become of a hit that a subscription wants."""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.model import Capture


@dataclass(frozen=True, slots=True)
class Emit:
    """Send an event; the order of captures is that of its values."""

    captures: tuple[Capture, ...]


Action = Emit
"""A union, which others may join: an engine that knows an action gives it a match arm where it plans a site."""
