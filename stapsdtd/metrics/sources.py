"""The parts of the daemon that have metrics. Does not import prometheus_client, which only an exporter needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stapsdtd.api.access import Gate
from stapsdtd.api.relay import Relay
from stapsdtd.capture.engine import Engine
from stapsdtd.catalog.registry import Registry
from stapsdtd.inventory.inventory import Inventory
from stapsdtd.procs.watcher import Watcher
from stapsdtd.runtime.health import Health
from stapsdtd.runtime.latency import Latency
from stapsdtd.sandbox.parser import SandboxedParser
from stapsdtd.sessions.subscriptions import Subscriptions


@dataclass(frozen=True, slots=True)
class Sources:
    """The exporter's thread reads all of these, through members that any thread may use.

    slices: of the threads that everybody shares, by name, but for the reader's, which the engine has.
    """

    engine: Engine
    registry: Registry
    watcher: Watcher
    parser: SandboxedParser
    subscriptions: Subscriptions
    gate: Gate
    relay: Relay
    health: Health
    inventory: Inventory
    slices: Mapping[str, Latency]
