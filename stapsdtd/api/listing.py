"""What a client may see: probes, and the processes that map them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stapsdtd.api import convert
from stapsdtd.api.backend import Backend
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.api.rights import Users
from stapsdtd.catalog.listing_limiter import ListingLimiter
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import Selector
from stapsdtd.kernel.identity import Identities, ProcessIdentity
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.ownership import belonging, belongs
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.fair_thread import Queue
from stapsdtd.v1 import stapsdt_pb2 as pb

_T = TypeVar("_T")

_PARSE_SECONDS = 10.0
"""How long a list waits for root's files that are still being parsed, ..."""
_ARM_SECONDS = 1.0
"""... and for what is being armed for its client."""


@dataclass(slots=True)
class Listed:
    """What a list shows. pids: of the processes that map the probes, also of those that are left out."""

    probes: list[pb.Probe] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    sites_left_out: int = 0


class Listing:
    """Takes what is mapped from the control thread, and looks up probes and processes in threads of its own.

    Runs on the API's event loop.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # a process can block whoever reads its command line, so no other request waits for this thread
        self._identity_executor = ThreadPoolExecutor(1, "stapsdtd-identity")
        self._command_lines = LockedCalls()

    def close(self) -> None:
        self._identity_executor.shutdown(wait=False)

    async def visible_pids(self, users: Users, members: Members | None) -> frozenset[int] | None:
        """Return the processes of these users that are among members; None for all processes."""
        member_pids = await asyncio.to_thread(members.pids) if members else None
        if users is None:
            return member_pids
        pids = await self._backend.control.run(self._pids)
        return await asyncio.to_thread(belonging, pids if member_pids is None else pids & member_pids, users)

    def _pids(self) -> frozenset[int]:
        """Runs in the control thread."""
        self._backend.refresh(frozenset())
        return self._backend.registry.pids()

    async def mapped(self, visible: frozenset[int] | None, users: Users, client: str) -> list[MappedObject]:
        """Return the objects that visible processes map; None for all processes.

        Waits for files of users, and root's, that are still being parsed, and for what is being armed for the client.
        """

        def look() -> tuple[list[MappedObject], Future[None], Future[None]]:
            refreshed = self._backend.refresh(users)
            armed = self._backend.subscriptions.arming.for_client(client)
            return self._backend.registry.mapped(visible), refreshed, armed

        objects, refreshed, armed = await self._backend.control.run(look)
        if not refreshed.done():
            await asyncio.wait({asyncio.wrap_future(refreshed)}, timeout=_PARSE_SECONDS)
            objects, _, armed = await self._backend.control.run(look)
        if not armed.done():
            await asyncio.wait({asyncio.wrap_future(armed)}, timeout=_ARM_SECONDS)
        return objects

    async def mapped_files(self, files: Sequence[NamedFile], visible: frozenset[int] | None) -> list[MappedObject]:
        """Return the objects of files, with the visible processes that map them."""

        def look() -> list[MappedObject]:
            self._backend.refresh(frozenset())
            objects = [(file, self._backend.subscriptions.arming.object_of(file)) for file in files]
            return [
                MappedObject(replace(obj, path=file.path), self._backend.registry.as_mapped(obj, visible).pids)
                for file, obj in objects
            ]

        return await self._backend.control.run(look)

    async def select(
        self,
        client: str,
        selectors: tuple[Selector, ...],
        objects: Iterable[MappedObject],
        pids: frozenset[int],
    ) -> Listed:
        """Select the probes that a client is shown. pids: see `catalog.selection.select`."""
        limiter = ListingLimiter()

        def steps() -> Generator[None, None, Listed]:
            listed = Listed()
            for probes in select(SelectorSet(selectors), objects, pids):
                listed.pids.update(pid for probe in probes for pid in probe.pids)
                listed.probes += (convert.probe(probe, self._backend.nops) for probe in limiter.of(probes))
                yield
            listed.sites_left_out = limiter.left_out
            return listed

        return await self.in_turns(client, steps())

    async def in_turns(self, client: str, steps: Generator[None, None, _T]) -> _T:
        """Take steps on behalf of a client, beside those of others, and return what they return."""
        return await asyncio.wrap_future(
            self._backend.matching.take_turns(Queue(client), steps, f"listing for {client}")
        )

    async def identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        """Return the identities of those processes that belong to these users."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._identity_executor, self._identities, pids, users)

    def _identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        identities = Identities(self._command_lines)
        by_pid = [(pid, identities.of(pid)) for pid in pids]
        # checked after reading, since another process may have the pid by then
        return [identity for pid, identity in by_pid if identity and (users is None or belongs(pid, users))]
