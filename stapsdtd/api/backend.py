"""The parts of the daemon that the API uses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from stapsdtd.api.access import Gate
from stapsdtd.api.cgroup_scope import Hierarchy, NamesOf
from stapsdtd.catalog.registry import Registry
from stapsdtd.config import ContainerSettings, Limits
from stapsdtd.functions.kernel import KernelFunctions
from stapsdtd.inventory.files import InstalledFile
from stapsdtd.inventory.inventory import InventoryStatus
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.container_names import ContainerNames
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.procs.file_opener import FileOpener
from stapsdtd.runtime.fair_thread import Backlog, FairThread
from stapsdtd.sessions.subscriptions import Subscriptions

_T = TypeVar("_T")

_LOOK_SECONDS = 10.0


class Control(Protocol):
    """The thread that owns the registry and the subscriptions."""

    async def run(self, work: Callable[[], _T]) -> _T: ...


class Inventory(Protocol):
    """As `inventory.inventory.Inventory`."""

    @property
    def is_on(self) -> bool: ...

    @property
    def status(self) -> InventoryStatus: ...

    def files(self) -> tuple[InstalledFile, ...]: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """registry and subscriptions belong to control's thread.

    refresh, looked: as of `Watcher`. features: what is known of the host by now. arming: what the arming thread has
    to do, for a client or, with None, for all. files: opens those that requests name. inventory: the files that are
    installed. functions: the kernel's. matching: the thread that finds out which probes selectors mean. hierarchy:
    the cgroups that requests name. container_names: what engines call their containers; takes some time. instance:
    tells this start of the daemon from others.
    """

    control: Control
    registry: Registry
    refresh: Callable[[frozenset[int] | None], Future[None]]
    looked: Callable[[frozenset[int] | None], Future[None]]
    subscriptions: Subscriptions
    limits: Limits
    features: Callable[[], tuple[Feature, ...]]
    engine: str
    gate: Gate
    nops: NopRewriting
    arming: Callable[[str | None], Backlog]
    files: FileOpener
    inventory: Inventory
    functions: KernelFunctions
    matching: FairThread
    hierarchy: Hierarchy = cgroups
    container_names: NamesOf = ContainerNames(ContainerSettings()).of
    instance: str = field(default_factory=partial(secrets.token_hex, 8))

    async def when_looked(self, users: frozenset[int] | None, work: Callable[[], _T]) -> _T:
        """Do work in the control thread, once that has looked at what users' processes map; None for everybody's."""

        def begin() -> tuple[Future[None], _T]:
            return self.looked(users), work()

        looked, result = await self.control.run(begin)
        if looked.done():
            return result
        await asyncio.wait({asyncio.wrap_future(looked)}, timeout=_LOOK_SECONDS)
        return await self.control.run(work)
