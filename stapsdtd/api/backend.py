"""The parts of the daemon that the API uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from stapsdtd.api.access import Gate
from stapsdtd.catalog.registry import Registry
from stapsdtd.config import Limits
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.sessions.subscriptions import Subscriptions

_T = TypeVar("_T")


class Control(Protocol):
    """The thread that owns the registry and the subscriptions."""

    async def run(self, work: Callable[[], _T]) -> _T: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """registry and subscriptions belong to control's thread.

    refresh: updates the registry with everything that the kernel has reported.
    """

    control: Control
    registry: Registry
    refresh: Callable[[], None]
    subscriptions: Subscriptions
    limits: Limits
    features: tuple[Feature, ...]
    engine: str
    gate: Gate
    nops: NopRewriting
