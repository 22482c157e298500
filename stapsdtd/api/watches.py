"""The open WatchProbes calls: their quota, what they send, and how changed rights reach them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial

from stapsdtd.api import wire
from stapsdtd.api.access import Caller
from stapsdtd.api.backend import Backend
from stapsdtd.api.calls import OpenCalls
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.api.listing import Listing
from stapsdtd.api.policy import Policy
from stapsdtd.api.rights import Rights
from stapsdtd.api.watch import Watch
from stapsdtd.catalog.listing_limiter import ListingLimiter
from stapsdtd.catalog.probe_view import ProbeView
from stapsdtd.catalog.registry import MappedObject
from stapsdtd.catalog.selection import portions
from stapsdtd.catalog.selectors import Selector
from stapsdtd.errors import LimitReachedError, StapsdtdError
from stapsdtd.model import Object, Probe
from stapsdtd.v1 import stapsdt_pb2 as pb

_ADDED, _REMOVED = pb.WatchProbesResponse.CHANGE_ADDED, pb.WatchProbesResponse.CHANGE_REMOVED
_VISIBILITY_SECONDS = 0.5
"""How often a restricted watch checks which processes it may show."""
_FEW_SITES = 4096
"""What is to be told of so many takes little memory, also if the client does not read it."""


class Watches:
    """Runs on the API's event loop."""

    def __init__(self, backend: Backend, listing: Listing, calls: OpenCalls) -> None:
        self._backend = backend
        self._listing = listing
        self._calls = calls
        self._open: set[Watch] = set()

    def stop(self, error: StapsdtdError) -> None:
        """Make all watches fail with error."""
        for watch in self._open:
            watch.stop(error)

    def apply(self, policy: Policy) -> None:
        for watch in self._open:
            watch.apply(policy.rights_or_none(watch.caller.peer))

    def check_quota(self, rights: Rights) -> None:
        """Raises LimitReachedError if the client has as many watches as it may have subscriptions."""
        quota = rights.quotas.max_subscriptions
        watches = sum(watch.caller.rights.client == rights.client for watch in self._open)
        if quota is not None and watches >= quota:
            text = f"{rights.client} has {quota} watches, as many as its role allows"
            raise LimitReachedError(text, "max_subscriptions")

    async def messages(
        self, caller: Caller, selectors: tuple[Selector, ...], pids: frozenset[int], members: Members | None
    ) -> AsyncGenerator[bytes]:
        """Yield the probes that match, then changes. Raises the error that stopped the watch."""
        visible = await self._listing.visible_pids(caller.rights.list, members)
        view = ProbeView(selectors, pids)
        watch = Watch(self._backend.registry, asyncio.get_running_loop(), caller, self._backend.gate.shares)
        self._open.add(watch)
        # the policy may have changed before apply() could see this watch
        watch.apply(self._backend.gate.policy.rights_or_none(caller.peer))

        async def changed(objects: Iterable[MappedObject]) -> AsyncGenerator[tuple[bool, Probe]]:
            for some in portions(objects, _sites, _FEW_SITES):
                for change in await self._listing.in_turns(watch.caller.rights.client, view.update(some)):
                    yield change

        async def told(
            change: pb.WatchProbesResponse.Change.ValueType, probe: Probe, limiter: ListingLimiter
        ) -> bytes | None:
            encoded = await self._listing.soon(watch.caller.rights.client, self._listing.encoded(probe, limiter))
            if encoded is None:
                return None
            return _change(change) + wire.delimited(pb.WatchProbesResponse.PROBE_FIELD_NUMBER, encoded)

        async with self._calls.cleanup(watch.end):
            try:
                present = await self._backend.control.run(partial(watch.begin, visible))
                limiter = ListingLimiter()
                async with aclosing(changed(present)) as probes:
                    async for _, probe in probes:
                        if message := await told(_ADDED, probe, limiter):
                            yield message
                yield _change(pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE)
                while True:
                    is_looking = visible is not None or watch.is_behind
                    objects = await watch.next(_VISIBILITY_SECONDS if is_looking else None)
                    async with aclosing(changed(objects)) as probes:
                        async for added, probe in probes:
                            if message := await told(_ADDED if added else _REMOVED, probe, ListingLimiter()):
                                yield message
                    while self._backend.gate.shares.seconds_to_wait(watch.caller.peer.client):
                        await self._backend.gate.pause(watch.caller)
                    before, visible = visible, await self._listing.visible_pids(watch.caller.rights.list, members)
                    if visible != before or watch.is_behind:
                        await self._backend.control.run(partial(watch.show, visible))
            finally:
                self._open.discard(watch)


def _sites(obj: Object) -> int:
    return len(obj.parsed.sites)


def _change(change: pb.WatchProbesResponse.Change.ValueType) -> bytes:
    return pb.WatchProbesResponse(change=change).SerializeToString()
