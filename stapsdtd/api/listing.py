"""What a client may see: probes, and the processes that map them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from stapsdtd.api.backend import Backend
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.api.rights import Users
from stapsdtd.catalog.registry import probes_of
from stapsdtd.catalog.selectors import Selector, select
from stapsdtd.kernel.identity import Identities, ProcessIdentity
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.ownership import belonging, belongs
from stapsdtd.model import Object, Probe
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.futures import finished

_PARSE_SECONDS = 10.0
"""How long a list waits for root's files that are still being parsed, ..."""
_ARM_SECONDS = 1.0
"""... and for what is being armed for its client."""


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
        self,
        selectors: tuple[Selector, ...],
        pids: frozenset[int],
        visible: frozenset[int] | None,
        client: str | None = None,
    ) -> list[Probe]:
        """Return the probes that match, as far as visible processes map them; None for all processes.

        client: whose list it is: root's files that are still being parsed are waited for, and so is what is being
        armed for that client. None waits for nothing.
        """

        def select_now() -> tuple[list[Probe], Future[None], Future[None]]:
            refreshed = self._backend.refresh()
            registry = self._backend.registry
            probes = [registry.seen_by(visible, probe) for probe in registry.probes()]
            armed = finished() if client is None else self._backend.subscriptions.arming.for_client(client)
            return select(selectors, probes, pids, visible), refreshed, armed

        probes, refreshed, armed = await self._backend.control.run(select_now)
        if client is not None and not refreshed.done():
            await asyncio.wait({asyncio.wrap_future(refreshed)}, timeout=_PARSE_SECONDS)
            probes, _, armed = await self._backend.control.run(select_now)
        if not armed.done():
            await asyncio.wait({asyncio.wrap_future(armed)}, timeout=_ARM_SECONDS)
        return probes

    async def select_in(
        self,
        files: Sequence[NamedFile],
        selectors: tuple[Selector, ...],
        pids: frozenset[int],
        visible: frozenset[int] | None,
        *,
        is_mapped: bool,
    ) -> list[Probe]:
        """Return the probes of files that match. is_mapped: only those that a visible process maps."""

        def select_now() -> list[Probe]:
            self._backend.refresh()
            probes: list[Probe] = []
            for file in files:
                obj = replace(self._backend.subscriptions.arming.object_of(file), path=file.path)
                mapping = self._backend.registry.mappings(obj.key).keys()
                seen_by = sorted(mapping if visible is None else mapping & visible)
                if seen_by or not is_mapped:
                    probes += select(selectors, list(probes_of(obj, seen_by)), pids)
            return probes

        return await self._backend.control.run(select_now)

    async def objects(self, files: Sequence[NamedFile] | None, visible: frozenset[int] | None) -> list[Object]:
        """Return the objects of files or, if these are None, those that visible processes map."""
        if files is not None:
            return [Object(file.key, file.path, file.parsed) for file in files]
        return await self._backend.control.run(lambda: self._backend.registry.objects_seen_by(visible))

    async def identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        """Return the identities of those processes that belong to these users."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._identity_executor, self._identities, pids, users)

    def _identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        identities = Identities(self._command_lines)
        by_pid = [(pid, identities.of(pid)) for pid in pids]
        # checked after reading, since another process may have the pid by then
        return [identity for pid, identity in by_pid if identity and (users is None or belongs(pid, users))]
