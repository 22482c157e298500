"""Where the figures come from; apart from what tells them, so that who wants no metrics loads no library for them."""

from __future__ import annotations

from dataclasses import dataclass

from stapsdtd.api.access import Gate
from stapsdtd.api.relay import Relay
from stapsdtd.capture.engine import Engine
from stapsdtd.catalog.registry import Registry
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.health import Health
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sessions.subscriptions import Subscriptions


@dataclass(frozen=True, slots=True)
class Sources:
    """Whose figures are told. All are read in the exporter's thread, by what each allows any thread to use."""

    engine: Engine
    registry: Registry
    watcher: Watcher
    parser: SandboxedParser
    subscriptions: Subscriptions
    gate: Gate
    relay: Relay
    health: Health
