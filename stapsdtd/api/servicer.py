"""StapsdtService: checks requests, hands work to the control thread, converts what comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import grpc

from stapsdtd import __version__
from stapsdtd.api import cgroup_scope, convert
from stapsdtd.api.access import Caller, Gate, Peer, Rights, Users, revoked
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.api.errors import Context, told
from stapsdtd.api.stream import SubscriptionStream, TakenOverError
from stapsdtd.api.watch import Watch
from stapsdtd.catalog.listing_limiter import ListingLimiter
from stapsdtd.catalog.probe_view import ProbeView
from stapsdtd.catalog.registry import Registry
from stapsdtd.catalog.selectors import Selector, select
from stapsdtd.config import Limits
from stapsdtd.errors import (
    InvalidArgumentError,
    LimitReachedError,
    ServerStoppingError,
    UnknownSubscriptionError,
)
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.identity import Identities, ProcessIdentity
from stapsdtd.kernel.locked import LockedCalls
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.kernel.ownership import belonging, belongs
from stapsdtd.model import Probe
from stapsdtd.sessions.subscription import EndReason, SiteState, SiteStatus, Subscription
from stapsdtd.sessions.subscriptions import Subscriptions
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1 import stapsdt_pb2_grpc

_T = TypeVar("_T")
_ADDED, _REMOVED = pb.WatchProbesResponse.CHANGE_ADDED, pb.WatchProbesResponse.CHANGE_REMOVED
_LOOK_SECONDS = 0.5
_NOTED_CHARACTERS = 200
_DISARM_SECONDS = 5.0
"""Usually it takes a tenth of one."""


class Control(Protocol):
    """The thread that owns registry and subscriptions."""

    async def run(self, work: Callable[[], _T]) -> _T: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """What the servicer serves. registry and subscriptions belong to control's thread.

    refresh brings the registry in step with what the kernel reported until then.
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


class StapsdtServicer(stapsdt_pb2_grpc.StapsdtServiceServicer):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.disarm_seconds = _DISARM_SECONDS
        self._streams: dict[str, tuple[SubscriptionStream, Caller]] = {}
        self._watches: set[Watch] = set()
        self._subscribers: WeakKeyDictionary[Subscription, Peer] = WeakKeyDictionary()
        # a process can have whoever reads its command line wait; no other request waits for this thread
        self._identifier = ThreadPoolExecutor(1, "stapsdtd-identity")
        self._command_lines = LockedCalls()
        self._open_calls = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def stop(self) -> None:
        """End what would never end by itself."""
        for watch in self._watches:
            watch.stop(ServerStoppingError())

    async def apply_policy(self) -> int:
        """End what the gate's policy does not allow any more; answer how many subscriptions that were."""
        policy = self._backend.gate.policy
        for watch in self._watches:
            watch.apply(policy.rights_or_none(watch.caller.peer))

        def is_allowed(subscription: Subscription) -> bool:
            peer = self._subscribers.get(subscription)
            rights = policy.rights_or_none(peer) if peer else None
            if rights is not None:
                subscription.client.change_quotas(rights.quotas)
            return rights is not None and rights.covers(subscription.spec.owners)

        ended = await self._backend.control.run(lambda: self._backend.subscriptions.revoke(is_allowed))
        for stream, caller in self._streams.values():
            rights = policy.rights_or_none(caller.peer)
            # what ended tells so by itself, when all that fired before has been delivered
            lives_on = not stream.subscription.is_ending
            if lives_on and (rights is None or not rights.may_use(stream.subscription)):
                stream.stop(revoked())
        return ended

    def _enter(self, call: str, context: Context) -> Caller:
        """Who calls, and what it may. Raises AccessDeniedError and LimitReachedError."""
        return self._backend.gate.enter(call, context.peer())

    async def _among(self, users: Users, members: Members | None) -> frozenset[int] | None:
        """Which processes are there for who may list those of these users, and asks for these; None for all."""
        among = await asyncio.to_thread(members.pids) if members else None
        if users is None:
            return among
        pids = await self._backend.control.run(self._pids)
        return await asyncio.to_thread(belonging, pids if among is None else pids & among, users)

    def _pids(self) -> frozenset[int]:
        self._backend.refresh()
        return self._backend.registry.pids()

    def _found(
        self, selectors: tuple[Selector, ...], pids: frozenset[int], among: frozenset[int] | None
    ) -> list[Probe]:
        """In the control thread."""
        self._backend.refresh()
        registry = self._backend.registry
        return select(selectors, [registry.seen_by(among, probe) for probe in registry.probes()], pids, among)

    async def finished(self) -> None:
        """Return when no call has anything left to do in the control thread, cancelled ones included."""
        await self._none_open.wait()
        self._identifier.shutdown(wait=False)

    @asynccontextmanager
    async def _lastly(self, work: Callable[[], None]) -> AsyncIterator[None]:
        """Do work in the control thread when a call is over, however it ends."""
        self._open_calls += 1
        self._none_open.clear()
        try:
            yield
        finally:
            try:
                await self._backend.control.run(work)
            finally:
                self._open_calls -= 1
                if not self._open_calls:
                    self._none_open.set()

    async def GetServerInfo(  # noqa: N802
        self,
        request: pb.GetServerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> pb.GetServerInfoResponse:
        backend = self._backend
        async with told(context):
            caller = self._enter("info", context)
            caller.note(logging.DEBUG, "allowed")
            among = await self._among(caller.rights.list, None)
            probes = await backend.control.run(lambda: self._found((), frozenset(), among))
            pids = await backend.control.run(backend.registry.pids) if among is None else among
        held = [found for found, _, _ in backend.subscriptions.all() if caller.rights.may_use(found)]
        return pb.GetServerInfoResponse(
            version=__version__,
            engine=backend.engine,
            kernel_release=platform.release(),
            machine=platform.machine(),
            features=map(convert.feature, backend.features),
            limits=convert.limits(backend.limits),
            subscriptions=len(held),
            processes=len(pids),
            objects=len({probe.object.key for probe in probes}),
            probes=len(probes),
            pid=os.getpid(),
            access=convert.access(caller.rights),
        )

    async def ListProbes(self, request: pb.ListProbesRequest, context: Context) -> pb.ListProbesResponse:  # noqa: N802
        async with told(context):
            caller = self._enter("list", context)
            with caller.noting_refusals():
                caller.rights.check_list()
            caller.note(logging.DEBUG, "allowed")
            selectors = convert.parse_selectors(request.selectors, self._backend.limits)
            pids = convert.parse_pids("pids", request.pids)
            members = await asyncio.to_thread(cgroup_scope.members, request.containers, request.cgroups)
            users = caller.rights.list
            among = await self._among(users, members)
            found = await self._backend.control.run(lambda: self._found(selectors, pids, among))
            limiter = ListingLimiter()
            response = pb.ListProbesResponse(
                probes=[convert.probe(each, self._backend.nops) for each in limiter.of(found)]
            )
            response.sites_left_out = limiter.left_out
            if request.details:
                pids_shown = sorted({pid for probe in found for pid in probe.pids})
                known = await asyncio.get_running_loop().run_in_executor(
                    self._identifier, self._identities, pids_shown, users
                )
                response.processes.extend(map(convert.process, known))
                objects = await self._backend.control.run(lambda: self._backend.registry.objects_seen_by(among))
                response.problems.extend(convert.problems(objects))
        return response

    def _identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        """Of those that still belong to these users when all that is told of them has been read."""
        identities = Identities(self._command_lines)
        known = [(pid, identities.of(pid)) for pid in pids]
        return [found for pid, found in known if found and (users is None or belongs(pid, users))]

    async def WatchProbes(  # noqa: N802
        self, request: pb.WatchProbesRequest, context: Context
    ) -> AsyncIterator[pb.WatchProbesResponse]:
        async with told(context):
            caller = self._enter("watch", context)
            with caller.noting_refusals():
                caller.rights.check_list()
                self._check_watches(caller.rights)
            caller.note(logging.INFO, "allowed", selectors=_noted(request.selectors))
            selectors = convert.parse_selectors(request.selectors, self._backend.limits)
            pids = convert.parse_pids("pids", request.pids)
            members = await asyncio.to_thread(cgroup_scope.members, request.containers, request.cgroups)
            among = await self._among(caller.rights.list, members)
            view = ProbeView(selectors, pids, among)
            watch = Watch(self._backend.registry, view, asyncio.get_running_loop(), caller)
            self._watches.add(watch)
            # apply_policy() did not know of it until now
            watch.apply(self._backend.gate.policy.rights_or_none(caller.peer))
            async with self._lastly(watch.end):
                try:
                    for probe in ListingLimiter().of(await self._backend.control.run(watch.begin)):
                        yield self._change(_ADDED, probe)
                    yield pb.WatchProbesResponse(change=pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE)
                    while True:
                        for added, probe in await watch.next(None if among is None else _LOOK_SECONDS):
                            for each in ListingLimiter().of([probe]):
                                yield self._change(_ADDED if added else _REMOVED, each)
                        before, among = among, await self._among(watch.caller.rights.list, members)
                        if among != before:
                            await self._backend.control.run(partial(watch.show, among))
                finally:
                    self._watches.discard(watch)

    def _change(self, kind: Any, probe: Probe) -> pb.WatchProbesResponse:
        return pb.WatchProbesResponse(change=kind, probe=convert.probe(probe, self._backend.nops))

    def _check_watches(self, rights: Rights) -> None:
        """Raises LimitReachedError: each one is looked after as a subscription is."""
        most = rights.quotas.max_subscriptions
        held = sum(watch.caller.rights.client == rights.client for watch in self._watches)
        if most is not None and held >= most:
            raise LimitReachedError(f"{rights.client} watches {most} times, as often as its role allows")

    async def Subscribe(self, request: pb.SubscribeRequest, context: Context) -> pb.SubscribeResponse:  # noqa: N802
        async with told(context):
            caller = self._enter("subscribe", context)
            spec = await asyncio.to_thread(convert.spec_of, request, self._backend.limits)
            unanswered: list[Subscription] = []

            def subscribe() -> list[SiteStatus]:
                # as of now, since revoke() will not look again at what began by an earlier policy
                rights = self._backend.gate.policy.rights(caller.peer)
                rights.check_trace(spec.scope.pids)
                allowed = replace(spec, owners=rights.trace, subscriber_pid=caller.peer.pid)
                subscription, statuses = self._backend.subscriptions.subscribe(allowed, rights.client, rights.quotas)
                unanswered.append(subscription)
                self._subscribers[subscription] = caller.peer
                return statuses

            # a client that gave up meanwhile never learns the id, and nobody else would unsubscribe
            async with self._lastly(lambda: self._abandon(unanswered)):
                with caller.noting_refusals():
                    statuses = await self._backend.control.run(subscribe)
                caller.note(
                    logging.INFO,
                    "allowed",
                    subscription=unanswered[0].id,
                    selectors=_noted(request.selectors),
                    sites=sum(status.state is SiteState.ARMED for status in statuses),
                )
                response = pb.SubscribeResponse(
                    subscription_id=unanswered[0].id,
                    sites=map(convert.site_status, statuses),
                    lease_seconds=spec.lease_seconds,
                    engine=self._backend.engine,
                )
                unanswered.clear()
        return response

    def _abandon(self, subscriptions: list[Subscription]) -> None:
        for subscription in subscriptions:
            self._backend.subscriptions.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)

    async def Stream(self, request: pb.StreamRequest, context: Context) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802
        async with told(context):
            caller = self._enter("stream", context)
            ident = request.subscription_id
            subscriptions = self._backend.subscriptions
            if request.encoding not in {pb.StreamRequest.ENCODING_ROWS, pb.StreamRequest.ENCODING_COLUMNS}:
                raise InvalidArgumentError("encoding", "choose ENCODING_ROWS or ENCODING_COLUMNS")
            if request.HasField("from_seq") and request.from_seq == 0:
                raise InvalidArgumentError("from_seq", "events are numbered from 1")
            stream = SubscriptionStream(
                self._subscription(ident, caller),
                request.encoding,
                request.from_seq if request.HasField("from_seq") else None,
            )
            earlier = self._streams.get(ident)
            if earlier is not None:
                earlier[0].stop(TakenOverError())
            self._streams[ident] = stream, caller
            async with self._lastly(lambda: subscriptions.stream_closed(ident)):
                try:
                    # a client may go while this is waited for, and what was opened is to be closed then too
                    await self._backend.control.run(lambda: subscriptions.stream_opened(ident))
                    async for message in stream.messages():
                        yield message
                except TakenOverError as error:
                    await context.abort(grpc.StatusCode.ABORTED, str(error))
                finally:
                    if self._streams.get(ident) == (stream, caller):
                        del self._streams[ident]

    def _subscription(self, ident: str, caller: Caller) -> Subscription:
        """Raises UnknownSubscriptionError, also for another client's: that there is one is not to be told."""
        found = self._backend.subscriptions.get(ident)
        owner = None if found.client.name == caller.rights.client else found.client.name
        # whose subscription revoke() ends, before its stream began, still gets that End and what had fired before
        is_subscriber = self._subscribers.get(found) == caller.peer
        if not is_subscriber and not caller.rights.may_use(found):
            caller.note_refusal("more than allowed", subscription=ident, owner=owner)
            raise UnknownSubscriptionError(ident)
        caller.note(logging.INFO, "allowed", subscription=ident, owner=owner)
        return found

    async def Unsubscribe(self, request: pb.UnsubscribeRequest, context: Context) -> pb.UnsubscribeResponse:  # noqa: N802
        async with told(context):
            caller = self._enter("unsubscribe", context)
            subscriptions = self._backend.subscriptions
            self._subscription(request.subscription_id, caller)

            def unsubscribe() -> tuple[Subscription, Future[None]]:
                ended = subscriptions.unsubscribe(request.subscription_id, EndReason.UNSUBSCRIBED)
                return ended, subscriptions.quiesced(ended.client)

            subscription, quiesced = await self._backend.control.run(unsubscribe)
            ending = {asyncio.wrap_future(each) for each in (subscription.ended, quiesced)}
            _, left = await asyncio.wait(ending, timeout=self.disarm_seconds)
            if left:
                caller.note(logging.WARNING, "still disarming", subscription=request.subscription_id)
        account = convert.account(subscription.account())
        return pb.UnsubscribeResponse(account=account, still_disarming=bool(left))

    async def ListSubscriptions(  # noqa: N802
        self,
        request: pb.ListSubscriptionsRequest,  # noqa: ARG002
        context: Context,
    ) -> pb.ListSubscriptionsResponse:
        async with told(context):
            caller = self._enter("subscriptions", context)
            caller.note(logging.DEBUG, "allowed")
            held = await self._backend.control.run(self._backend.subscriptions.all)
        return pb.ListSubscriptionsResponse(
            subscriptions=[
                convert.subscription(found, streaming=streaming, lease_left_seconds=left)
                for found, streaming, left in held
                if caller.rights.may_use(found)
            ]
        )


def _noted(selectors: Sequence[str]) -> str:
    return " ".join(selectors)[:_NOTED_CHARACTERS]
