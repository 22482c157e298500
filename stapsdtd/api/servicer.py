"""StapsdtService: checks requests, hands work to the control thread, and converts the results."""

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

from stapsdtd import __version__
from stapsdtd.api import cgroup_scope, convert
from stapsdtd.api.access import Caller, Gate, Peer, Rights, Users, revoked
from stapsdtd.api.cgroup_scope import Members
from stapsdtd.api.errors import Context, abort_on_error
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
_VISIBILITY_SECONDS = 0.5
"""How often a restricted watch checks which processes it may show."""
_LOGGED_CHARACTERS = 200
_DISARM_SECONDS = 5.0
"""Disarming usually takes 0.1 s."""


class Control(Protocol):
    """The thread that owns the registry and the subscriptions."""

    async def run(self, work: Callable[[], _T]) -> _T: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of the daemon that the servicer uses. registry and subscriptions belong to control's thread.

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


class StapsdtServicer(stapsdt_pb2_grpc.StapsdtServiceServicer):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.disarm_seconds = _DISARM_SECONDS
        self._streams: dict[str, tuple[SubscriptionStream, Caller]] = {}
        self._watches: set[Watch] = set()
        self._subscribers: WeakKeyDictionary[Subscription, Peer] = WeakKeyDictionary()
        # a process can block whoever reads its command line, so no other request waits for this thread
        self._identity_executor = ThreadPoolExecutor(1, "stapsdtd-identity")
        self._command_lines = LockedCalls()
        self._open_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def stop(self) -> None:
        """End the calls that would not end by themselves."""
        for watch in self._watches:
            watch.stop(ServerStoppingError())

    async def apply_policy(self) -> int:
        """End whatever the gate's policy no longer allows, and return the number of subscriptions ended."""
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
            # the stream of an ending subscription still delivers what fired before, and ends with its own End
            is_live = not stream.subscription.is_ending
            if is_live and (rights is None or not rights.may_use(stream.subscription)):
                stream.stop(revoked())
        return ended

    def _enter(self, call: str, context: Context) -> Caller:
        """Raises AccessDeniedError and LimitReachedError."""
        return self._backend.gate.enter(call, context.peer())

    async def _visible_pids(self, users: Users, members: Members | None) -> frozenset[int] | None:
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

    def _select(
        self, selectors: tuple[Selector, ...], pids: frozenset[int], visible: frozenset[int] | None
    ) -> list[Probe]:
        """Runs in the control thread."""
        self._backend.refresh()
        registry = self._backend.registry
        return select(selectors, [registry.seen_by(visible, probe) for probe in registry.probes()], pids, visible)

    async def finished(self) -> None:
        """Return when no call, cancelled ones included, has anything left to do in the control thread."""
        await self._idle.wait()
        self._identity_executor.shutdown(wait=False)

    @asynccontextmanager
    async def _cleanup(self, work: Callable[[], None]) -> AsyncIterator[None]:
        """Run work in the control thread when the call is over, however it ends."""
        self._open_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            try:
                await self._backend.control.run(work)
            finally:
                self._open_calls -= 1
                if not self._open_calls:
                    self._idle.set()

    async def GetServerInfo(  # noqa: N802
        self,
        request: pb.GetServerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> pb.GetServerInfoResponse:
        backend = self._backend
        async with abort_on_error(context):
            caller = self._enter("info", context)
            caller.log(logging.DEBUG, "allowed")
            visible = await self._visible_pids(caller.rights.list, None)
            probes = await backend.control.run(lambda: self._select((), frozenset(), visible))
            pids = await backend.control.run(backend.registry.pids) if visible is None else visible
        subscriptions = [each for each, _, _ in backend.subscriptions.all() if caller.rights.may_use(each)]
        return pb.GetServerInfoResponse(
            version=__version__,
            engine=backend.engine,
            kernel_release=platform.release(),
            machine=platform.machine(),
            features=map(convert.feature, backend.features),
            limits=convert.limits(backend.limits),
            subscriptions=len(subscriptions),
            processes=len(pids),
            objects=len({probe.object.key for probe in probes}),
            probes=len(probes),
            pid=os.getpid(),
            access=convert.access(caller.rights),
        )

    async def ListProbes(self, request: pb.ListProbesRequest, context: Context) -> pb.ListProbesResponse:  # noqa: N802
        async with abort_on_error(context):
            caller = self._enter("list", context)
            with caller.recording_refusals():
                caller.rights.check_list()
            caller.log(logging.DEBUG, "allowed")
            selectors = convert.parse_selectors(request.selectors, self._backend.limits)
            pids = convert.parse_pids("pids", request.pids)
            members = await asyncio.to_thread(cgroup_scope.members, request.containers, request.cgroups)
            users = caller.rights.list
            visible = await self._visible_pids(users, members)
            probes = await self._backend.control.run(lambda: self._select(selectors, pids, visible))
            limiter = ListingLimiter()
            response = pb.ListProbesResponse(
                probes=[convert.probe(probe, self._backend.nops) for probe in limiter.of(probes)]
            )
            response.sites_left_out = limiter.left_out
            if request.details:
                shown_pids = sorted({pid for probe in probes for pid in probe.pids})
                identities = await asyncio.get_running_loop().run_in_executor(
                    self._identity_executor, self._identities, shown_pids, users
                )
                response.processes.extend(map(convert.process, identities))
                objects = await self._backend.control.run(lambda: self._backend.registry.objects_seen_by(visible))
                response.problems.extend(convert.problems(objects))
        return response

    def _identities(self, pids: Sequence[int], users: Users) -> list[ProcessIdentity]:
        """Return the identities of processes that still belong to these users after the identities were read."""
        identities = Identities(self._command_lines)
        by_pid = [(pid, identities.of(pid)) for pid in pids]
        return [identity for pid, identity in by_pid if identity and (users is None or belongs(pid, users))]

    async def WatchProbes(  # noqa: N802
        self, request: pb.WatchProbesRequest, context: Context
    ) -> AsyncIterator[pb.WatchProbesResponse]:
        async with abort_on_error(context):
            caller = self._enter("watch", context)
            with caller.recording_refusals():
                caller.rights.check_list()
                self._check_watches(caller.rights)
            caller.log(logging.INFO, "allowed", selectors=_shortened(request.selectors))
            selectors = convert.parse_selectors(request.selectors, self._backend.limits)
            pids = convert.parse_pids("pids", request.pids)
            members = await asyncio.to_thread(cgroup_scope.members, request.containers, request.cgroups)
            visible = await self._visible_pids(caller.rights.list, members)
            view = ProbeView(selectors, pids, visible)
            watch = Watch(self._backend.registry, view, asyncio.get_running_loop(), caller)
            self._watches.add(watch)
            # the policy may have changed before apply_policy() could see this watch
            watch.apply(self._backend.gate.policy.rights_or_none(caller.peer))
            async with self._cleanup(watch.end):
                try:
                    for probe in ListingLimiter().of(await self._backend.control.run(watch.begin)):
                        yield self._change(_ADDED, probe)
                    yield pb.WatchProbesResponse(change=pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE)
                    while True:
                        for added, probe in await watch.next(None if visible is None else _VISIBILITY_SECONDS):
                            for limited in ListingLimiter().of([probe]):
                                yield self._change(_ADDED if added else _REMOVED, limited)
                        before, visible = visible, await self._visible_pids(watch.caller.rights.list, members)
                        if visible != before:
                            await self._backend.control.run(partial(watch.show, visible))
                finally:
                    self._watches.discard(watch)

    def _change(self, kind: Any, probe: Probe) -> pb.WatchProbesResponse:
        return pb.WatchProbesResponse(change=kind, probe=convert.probe(probe, self._backend.nops))

    def _check_watches(self, rights: Rights) -> None:
        """Raises LimitReachedError if the client has as many watches as it may have subscriptions."""
        quota = rights.quotas.max_subscriptions
        watches = sum(watch.caller.rights.client == rights.client for watch in self._watches)
        if quota is not None and watches >= quota:
            raise LimitReachedError(f"{rights.client} has {quota} watches, as many as its role allows")

    async def Subscribe(self, request: pb.SubscribeRequest, context: Context) -> pb.SubscribeResponse:  # noqa: N802
        async with abort_on_error(context):
            caller = self._enter("subscribe", context)
            spec = await asyncio.to_thread(convert.spec_of, request, self._backend.limits)
            unanswered: list[Subscription] = []

            def subscribe() -> list[SiteStatus]:
                # by the current policy, since a change that was applied before this would not be applied again
                rights = self._backend.gate.policy.rights(caller.peer)
                rights.check_trace(spec.scope.pids)
                allowed = replace(spec, owners=rights.trace, subscriber_pid=caller.peer.pid)
                subscription, statuses = self._backend.subscriptions.subscribe(allowed, rights.client, rights.quotas)
                unanswered.append(subscription)
                self._subscribers[subscription] = caller.peer
                return statuses

            # if the client cancels meanwhile, it never learns the id and nobody would unsubscribe
            async with self._cleanup(lambda: self._abandon(unanswered)):
                with caller.recording_refusals():
                    statuses = await self._backend.control.run(subscribe)
                caller.log(
                    logging.INFO,
                    "allowed",
                    subscription=unanswered[0].id,
                    selectors=_shortened(request.selectors),
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

    async def Stream(self, request: pb.StreamRequest, context: Context) -> AsyncIterator[bytes]:  # type: ignore[override]  # noqa: N802
        async with abort_on_error(context):
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
            previous = self._streams.get(ident)
            if previous is not None:
                previous[0].stop(TakenOverError())
            self._streams[ident] = stream, caller
            async with self._cleanup(lambda: subscriptions.stream_closed(ident)):
                try:
                    # within the cleanup: the client may cancel during this call
                    await self._backend.control.run(lambda: subscriptions.stream_opened(ident))
                    async for message in stream.messages():
                        yield message
                finally:
                    if self._streams.get(ident) == (stream, caller):
                        del self._streams[ident]

    def _subscription(self, ident: str, caller: Caller) -> Subscription:
        """Raises UnknownSubscriptionError, also for another client's subscription: its existence is not revealed."""
        subscription = self._backend.subscriptions.get(ident)
        owner = None if subscription.client.name == caller.rights.client else subscription.client.name
        # the subscriber may still read the End, and what fired before, after its rights were revoked
        is_subscriber = self._subscribers.get(subscription) == caller.peer
        if not is_subscriber and not caller.rights.may_use(subscription):
            caller.record_refusal("more than allowed", subscription=ident, owner=owner)
            raise UnknownSubscriptionError(ident)
        caller.log(logging.INFO, "allowed", subscription=ident, owner=owner)
        return subscription

    async def Unsubscribe(self, request: pb.UnsubscribeRequest, context: Context) -> pb.UnsubscribeResponse:  # noqa: N802
        async with abort_on_error(context):
            caller = self._enter("unsubscribe", context)
            subscriptions = self._backend.subscriptions
            self._subscription(request.subscription_id, caller)

            def unsubscribe() -> tuple[Subscription, Future[None]]:
                ended = subscriptions.unsubscribe(request.subscription_id, EndReason.UNSUBSCRIBED)
                return ended, subscriptions.quiesced(ended.client)

            subscription, quiesced = await self._backend.control.run(unsubscribe)
            ending = {asyncio.wrap_future(future) for future in (subscription.ended, quiesced)}
            _, pending = await asyncio.wait(ending, timeout=self.disarm_seconds)
            if pending:
                caller.log(logging.WARNING, "still disarming", subscription=request.subscription_id)
        account = convert.account(subscription.account())
        return pb.UnsubscribeResponse(account=account, still_disarming=bool(pending))

    async def ListSubscriptions(  # noqa: N802
        self,
        request: pb.ListSubscriptionsRequest,  # noqa: ARG002
        context: Context,
    ) -> pb.ListSubscriptionsResponse:
        async with abort_on_error(context):
            caller = self._enter("subscriptions", context)
            caller.log(logging.DEBUG, "allowed")
            subscriptions = await self._backend.control.run(self._backend.subscriptions.all)
        return pb.ListSubscriptionsResponse(
            subscriptions=[
                convert.subscription(subscription, streaming=streaming, lease_left_seconds=lease_left)
                for subscription, streaming, lease_left in subscriptions
                if caller.rights.may_use(subscription)
            ]
        )


def _shortened(selectors: Sequence[str]) -> str:
    return " ".join(selectors)[:_LOGGED_CHARACTERS]
