"""What a client may see: probes, and the processes that map them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar
from weakref import WeakValueDictionary

from stapsdtd.api import convert, wire
from stapsdtd.api.backend import Backend
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.api.moved_text import chosen_sites, moved_texts
from stapsdtd.api.parts import serialized
from stapsdtd.api.rights import Users
from stapsdtd.catalog.listing_limiter import ListingLimiter
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import select
from stapsdtd.catalog.selector_set import SelectorSet
from stapsdtd.catalog.selectors import Selector
from stapsdtd.kernel.identity import Identities, ProcessIdentity
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.ownership import belonging, belongs
from stapsdtd.model import Object, Probe, Problem
from stapsdtd.procs.named_files import NamedFile
from stapsdtd.runtime.fair_thread import FairThread, Queue
from stapsdtd.runtime.slices import Turn
from stapsdtd.v1 import stapsdt_pb2 as pb

_T = TypeVar("_T")

_PARSE_SECONDS = 10.0
"""How long a list waits for root's files that are still being parsed, ..."""
_ARM_SECONDS = 1.0
"""... and for what is being armed for its client."""
_BEGUN_AT_ONCE = 4
_MAX_PROBLEMS = 1000
"""In one list."""


@dataclass(slots=True)
class Listed:
    """What a list shows. probes: parts of a serialized ListProbesResponse. pids: of the processes that map the probes,
    also of those that are left out.
    """

    probes: list[bytes] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    sites_left_out: int = 0


class Listing:
    """Takes what is mapped from the control thread, and looks up probes and processes in threads of its own.

    Runs on the API's event loop.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # a process can block whoever reads its command line or its maps, so nothing else waits for this thread
        self._identity_thread = FairThread("stapsdtd-identity")
        self._locked_calls = LockedCalls()
        self._begun: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def close(self) -> None:
        self._identity_thread.stop()

    async def visible_pids(self, users: Users, members: Members | None) -> frozenset[int] | None:
        """Return the processes of these users that are among members; None for all processes."""
        member_pids = await asyncio.to_thread(members.pids) if members else None
        if users is None:
            return member_pids
        pids = await self._backend.when_looked(users, self._backend.registry.pids)
        return await asyncio.to_thread(belonging, pids if member_pids is None else pids & member_pids, users)

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
            objects = [(file, self._backend.subscriptions.arming.object_of(file)) for file in files]
            return [
                MappedObject(replace(obj, path=file.path), self._backend.registry.as_mapped(obj, visible).pids)
                for file, obj in objects
            ]

        return await self._backend.when_looked(frozenset(), look)

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
                if probes:
                    # which are of one object
                    listed.pids.update(probes[0].pids)
                    listed.probes += yield from self._trimmed(probes, limiter)
                yield
            listed.sites_left_out = limiter.left_out
            return listed

        return await self.in_turns(client, steps())

    def _trimmed(self, probes: Iterable[Probe], limiter: ListingLimiter) -> Generator[None, None, list[bytes]]:
        """Serialize what a limiter leaves of probes, as parts of a ListProbesResponse."""
        parts = []
        turn = Turn()
        for probe in probes:
            encoded = yield from self.encoded(probe, limiter)
            if encoded is not None:
                parts.append(wire.delimited(pb.ListProbesResponse.PROBES_FIELD_NUMBER, encoded))
            if turn.is_over:
                yield
                turn.begin()
        return parts

    def encoded(self, probe: Probe, limiter: ListingLimiter) -> Generator[None, None, bytes | None]:
        """Serialize what a limiter leaves of a probe; return None if that is nothing."""
        shown = yield from limiter.trimmed(probe)
        return None if shown is None else (yield from convert.probe(shown, self._backend.nops))

    async def moved(
        self,
        client: str,
        selectors: tuple[Selector, ...],
        objects: Iterable[MappedObject],
        pids: frozenset[int],
        users: Users,
    ) -> bytes:
        """Describe chosen text that processes of these users have moved. pids: see `chosen_sites`."""
        chosen = await self.in_turns(client, chosen_sites(selectors, objects, pids))
        registry = self._backend.registry
        mappings = await self._backend.control.run(lambda: [registry.mappings(each.object.key) for each in chosen])
        steps = moved_texts(zip(chosen, mappings, strict=True), users, self._locked_calls)
        return await asyncio.wrap_future(self._identity_thread.take_turns(Queue(client), steps))

    @staticmethod
    def processes(identities: Sequence[ProcessIdentity], names: Mapping[str, str]) -> Generator[None, None, bytes]:
        """Describe processes. names: of containers, by their ids."""
        return serialized(
            pb.ListProbesResponse.PROCESSES_FIELD_NUMBER,
            identities,
            lambda each: convert.process(each, names.get(each.container_id, "")),
        )

    @staticmethod
    def problems(selectors: Sequence[Selector], objects: Iterable[MappedObject]) -> Generator[None, None, bytes]:
        """Describe notes that cannot be used and that selectors choose; those without a name in files that they may
        choose from.
        """
        chooser = SelectorSet(selectors)
        found: list[tuple[Object, Problem]] = []
        left_out = 0
        for obj in (mapped.object for mapped in objects if mapped.object.parsed.problems):
            (meant,) = yield from chooser.meant([(obj.path, obj.parsed.all_providers)])
            chosen = yield from chooser.choose(meant, obj.parsed.unusable)
            names = {(each.site.provider, each.site.name) for each in chosen}
            if meant or not selectors:
                some = [each for each in obj.parsed.problems if (each.provider, each.name) in names or each.is_nameless]
                room = _MAX_PROBLEMS - len(found)
                found += ((obj, each) for each in some[:room])
                left_out += len(some[room:]) + obj.parsed.problems_left_out
            yield
        told = yield from serialized(
            pb.ListProbesResponse.PROBLEMS_FIELD_NUMBER, found, lambda each: convert.problem(*each)
        )
        return told + pb.ListProbesResponse(problems_left_out=left_out).SerializeToString()

    async def soon(self, client: str, steps: Generator[None, None, _T]) -> _T:
        """Take the first step at once, so that what is little waits for nobody, and the others in turns."""
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
        return await self.in_turns(client, steps)

    async def in_turns(self, client: str, steps: Generator[None, None, _T]) -> _T:
        """Take steps on behalf of a client, beside those of others, and return what they return.

        Of a client, a few at a time: what has begun takes memory, and the others wait with none.
        """
        async with self._begun.setdefault(client, asyncio.Semaphore(_BEGUN_AT_ONCE)):
            return await asyncio.wrap_future(
                self._backend.matching.take_turns(Queue(client), steps, f"listing for {client}")
            )

    async def identities(self, client: str, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        """Return the identities of those processes that belong to these users."""
        steps = self._identities(pids, users)
        return await asyncio.wrap_future(self._identity_thread.take_turns(Queue(client), steps))

    def _identities(self, pids: Sequence[int], users: Users) -> Generator[None, None, list[ProcessIdentity]]:
        identities = Identities(self._locked_calls)
        found = []
        for pid in pids:
            identity = identities.of(pid)
            # checked after reading, since another process may have the pid by then
            if identity and (users is None or belongs(pid, users)):
                found.append(identity)
            yield
        return found
