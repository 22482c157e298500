"""What `stapsdt doctor` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that stapsdtd uses, or a runtime. required: whether it cannot capture without it."""

    name: str
    available: bool
    required: bool
    detail: str
    remedy: str
