"""What a client may see: probes, and the processes that map them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stapsdtd.api.access import Users
from stapsdtd.api.backend import Backend
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.catalog.selectors import Selector, select
from stapsdtd.kernel.identity import Identities, ProcessIdentity
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.ownership import belonging, belongs
from stapsdtd.model import Probe


class Listing:
    """Looks up probes in the control thread, and processes in threads of its own. Runs on the API's event loop."""

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
        self._backend.refresh()
        return self._backend.registry.pids()

    async def select(
        self, selectors: tuple[Selector, ...], pids: frozenset[int], visible: frozenset[int] | None
    ) -> list[Probe]:
        """Return the probes that match, as far as visible processes map them; None for all processes."""
        return await self._backend.control.run(lambda: self._select(selectors, pids, visible))

    def _select(
        self, selectors: tuple[Selector, ...], pids: frozenset[int], visible: frozenset[int] | None
    ) -> list[Probe]:
        """Runs in the control thread."""
        self._backend.refresh()
        registry = self._backend.registry
        return select(selectors, [registry.seen_by(visible, probe) for probe in registry.probes()], pids, visible)

    async def identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        """Return the identities of those processes that belong to these users."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._identity_executor, self._identities, pids, users)

    def _identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        identities = Identities(self._command_lines)
        by_pid = [(pid, identities.of(pid)) for pid in pids]
        # checked after reading, since another process may have the pid by then
        return [identity for pid, identity in by_pid if identity and (users is None or belongs(pid, users))]
