"""StapsdtService: checks requests, hands work to the control thread, converts what comes back."""

from __future__ import annotations

import asyncio
import os
import platform
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from stapsdtd import __version__
from stapsdtd.api import convert
from stapsdtd.api.errors import Context, told
from stapsdtd.api.stream import SubscriptionStream, TakenOverError
from stapsdtd.config import Limits
from stapsdtd.errors import InvalidArgumentError, LimitReachedError, ServerStoppingError
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.identity import identify
from stapsdtd.model import Probe
from stapsdtd.probes.registry import Change, Registry
from stapsdtd.probes.selectors import select
from stapsdtd.probes.visible import VisibleProbes
from stapsdtd.route.subscription import EndReason, SiteStatus, Subscription
from stapsdtd.route.subscriptions import Subscriptions
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1 import stapsdt_pb2_grpc

_T = TypeVar("_T")
_ADDED, _REMOVED = pb.WatchProbesResponse.CHANGE_ADDED, pb.WatchProbesResponse.CHANGE_REMOVED
_CHANGES_KEPT = 100_000


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


class StapsdtServicer(stapsdt_pb2_grpc.StapsdtServiceServicer):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._streams: dict[str, SubscriptionStream] = {}
        self._watches: set[_Watch] = set()
        self._open_calls = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def stop(self) -> None:
        """End what would never end by itself."""
        for watch in self._watches:
            watch.stop()

    async def finished(self) -> None:
        """Return when no call has anything left to do in the control thread, cancelled ones included."""
        await self._none_open.wait()

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
        context: Context,  # noqa: ARG002
    ) -> pb.GetServerInfoResponse:
        backend = self._backend
        probes = await backend.control.run(self._probes)
        pids = await backend.control.run(backend.registry.pids)
        return pb.GetServerInfoResponse(
            version=__version__,
            engine=backend.engine,
            kernel_release=platform.release(),
            machine=platform.machine(),
            features=map(convert.feature, backend.features),
            limits=convert.limits(backend.limits),
            subscriptions=len(backend.subscriptions.all()),
            processes=len(pids),
            objects=len({probe.object.key for probe in probes}),
            probes=len(probes),
            pid=os.getpid(),
        )

    async def ListProbes(self, request: pb.ListProbesRequest, context: Context) -> pb.ListProbesResponse:  # noqa: N802
        async with told(context):
            selectors = convert.parse_selectors(request.selectors, self._backend.limits)
            pids = convert.parse_pids("pids", request.pids)
            probes = await self._backend.control.run(self._probes)
            found = select(selectors, probes, pids)
            response = pb.ListProbesResponse(probes=map(convert.probe, found))
            if request.details:
                pids_shown = sorted({pid for probe in found for pid in probe.pids})
                # reading a command line reads the process's memory, which a process can make slow
                known = await asyncio.to_thread(lambda: [identify(pid) for pid in pids_shown])
                response.processes.extend(convert.process(identity) for identity in known if identity)
                objects = await self._backend.control.run(self._backend.registry.objects)
                response.problems.extend(convert.problems(objects))
        return response

    def _probes(self) -> list[Probe]:
        self._backend.refresh()
        return self._backend.registry.probes()

    async def WatchProbes(  # noqa: N802
        self, request: pb.WatchProbesRequest, context: Context
    ) -> AsyncIterator[pb.WatchProbesResponse]:
        async with told(context):
            selectors = convert.parse_selectors(request.selectors, self._backend.limits)
            pids = convert.parse_pids("pids", request.pids)
            watch = _Watch(self._backend.registry, VisibleProbes(selectors, pids), asyncio.get_running_loop())
            self._watches.add(watch)
            async with self._lastly(watch.end):
                try:
                    for probe in await self._backend.control.run(watch.begin):
                        yield _change(_ADDED, probe)
                    yield pb.WatchProbesResponse(change=pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE)
                    while True:
                        for added, probe in await watch.next():
                            yield _change(_ADDED if added else _REMOVED, probe)
                finally:
                    self._watches.discard(watch)

    async def Subscribe(self, request: pb.SubscribeRequest, context: Context) -> pb.SubscribeResponse:  # noqa: N802
        async with told(context):
            wish = convert.wish_of(request, self._backend.limits)
            unanswered: list[Subscription] = []

            def subscribe() -> list[SiteStatus]:
                subscription, statuses = self._backend.subscriptions.subscribe(wish)
                unanswered.append(subscription)
                return statuses

            # a client that gave up meanwhile never learns the id, and nobody else would unsubscribe
            async with self._lastly(lambda: self._abandon(unanswered)):
                statuses = await self._backend.control.run(subscribe)
                response = pb.SubscribeResponse(
                    subscription_id=unanswered[0].id,
                    sites=map(convert.site_status, statuses),
                    lease_seconds=wish.lease_seconds,
                    engine=self._backend.engine,
                )
                unanswered.clear()
        return response

    def _abandon(self, subscriptions: list[Subscription]) -> None:
        for subscription in subscriptions:
            self._backend.subscriptions.unsubscribe(subscription.id, EndReason.UNSUBSCRIBED)

    async def Stream(self, request: pb.StreamRequest, context: Context) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802
        async with told(context):
            ident = request.subscription_id
            subscriptions = self._backend.subscriptions
            if request.encoding not in {pb.StreamRequest.ENCODING_ROWS, pb.StreamRequest.ENCODING_COLUMNS}:
                raise InvalidArgumentError("encoding", "choose ENCODING_ROWS or ENCODING_COLUMNS")
            if request.HasField("from_seq") and request.from_seq == 0:
                raise InvalidArgumentError("from_seq", "events are numbered from 1")
            stream = SubscriptionStream(
                subscriptions.get(ident),
                request.encoding,
                request.from_seq if request.HasField("from_seq") else None,
            )
            earlier = self._streams.get(ident)
            if earlier is not None:
                earlier.take_over()
            self._streams[ident] = stream
            async with self._lastly(lambda: subscriptions.stream_closed(ident)):
                try:
                    # a client may go while this is waited for, and what was opened is to be closed then too
                    await self._backend.control.run(lambda: subscriptions.stream_opened(ident))
                    async for message in stream.messages():
                        yield message
                except TakenOverError as error:
                    await context.abort(grpc.StatusCode.ABORTED, str(error))
                finally:
                    if self._streams.get(ident) is stream:
                        del self._streams[ident]

    async def Unsubscribe(self, request: pb.UnsubscribeRequest, context: Context) -> pb.UnsubscribeResponse:  # noqa: N802
        async with told(context):
            subscriptions = self._backend.subscriptions

            def unsubscribe() -> tuple[Subscription, Future[None]]:
                ended = subscriptions.unsubscribe(request.subscription_id, EndReason.UNSUBSCRIBED)
                return ended, subscriptions.settled()

            subscription, settled = await self._backend.control.run(unsubscribe)
            await asyncio.wrap_future(settled)
        return pb.UnsubscribeResponse(account=convert.account(subscription.account()))

    async def ListSubscriptions(  # noqa: N802
        self,
        request: pb.ListSubscriptionsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> pb.ListSubscriptionsResponse:
        held = await self._backend.control.run(self._backend.subscriptions.all)
        return pb.ListSubscriptionsResponse(
            subscriptions=[
                convert.subscription(found, streaming=streaming, lease_left_seconds=left)
                for found, streaming, left in held
            ]
        )


def _change(kind: Any, probe: Probe) -> pb.WatchProbesResponse:
    return pb.WatchProbesResponse(change=kind, probe=convert.probe(probe))


class _Watch:
    """Carries changes from the control thread, where the registry tells them, to a WatchProbes call."""

    def __init__(self, registry: Registry, visible: VisibleProbes, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._visible = visible
        self._loop = loop
        self._changes: deque[tuple[bool, Probe]] = deque()
        self._news = asyncio.Event()
        self._overflowed = False
        self._stopping = False
        self._stop: Callable[[], None] = lambda: None

    def begin(self) -> list[Probe]:
        self._stop = self._registry.listen(self._on_change)
        return self._visible.begin(self._registry.probes())

    def end(self) -> None:
        self._stop()
        self._stop = lambda: None

    def stop(self) -> None:
        """Make `next` raise ServerStoppingError."""
        self._stopping = True
        self._news.set()

    def _on_change(self, change: Change) -> None:
        if self._overflowed:
            return
        found = self._visible.changed(change.object, self._registry.mappings(change.object.key))
        if found:
            self._overflowed = len(self._changes) + len(found) > _CHANGES_KEPT
            self._changes.extend(found)
            self._loop.call_soon_threadsafe(self._news.set)

    async def next(self) -> list[tuple[bool, Probe]]:
        """Raises LimitReachedError where more changes came than are kept."""
        await self._news.wait()
        self._news.clear()
        if self._stopping:
            raise ServerStoppingError
        if self._overflowed:
            raise LimitReachedError("more probes came and went than this client read; watch again for a fresh snapshot")
        return [self._changes.popleft() for _ in range(len(self._changes))]
