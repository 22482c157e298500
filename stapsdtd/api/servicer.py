"""StapsdtService: checks requests, hands work to the control thread, and converts the results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from stapsdtd.api import requests, subscription_messages
from stapsdtd.api.access import Caller, Gate
from stapsdtd.api.backend import Backend
from stapsdtd.api.calls import OpenCalls
from stapsdtd.api.cgroup_scope import Members, NamesOf, members
from stapsdtd.api.chains import with_functions
from stapsdtd.api.kernel_functions import list_functions, traced_functions
from stapsdtd.api.listing import Listed, Listing
from stapsdtd.api.parts import serialized
from stapsdtd.api.request_files import RequestFiles
from stapsdtd.api.rights import Users
from stapsdtd.api.server_info import server_info
from stapsdtd.api.stream import StreamTurns
from stapsdtd.api.stream_requests import check_id, check_stream, stream_of
from stapsdtd.api.streams import Streams
from stapsdtd.api.subscribers import Subscribers
from stapsdtd.api.texts import RequestTexts
from stapsdtd.api.watches import Watches
from stapsdtd.errors import NoMatchError, NotArmedError, ServerStoppingError
from stapsdtd.sessions.ending import Ending
from stapsdtd.sessions.live import FirstArming
from stapsdtd.sessions.scoped_processes import descendants
from stapsdtd.sessions.subscription import EndReason, SiteState, Subscription
from stapsdtd.v1 import kernel_functions_pb2 as functions_pb
from stapsdtd.v1 import stapsdt_pb2 as pb

_LOGGED_CHARACTERS = 200
_ARM_SECONDS = 5.0
_DISARM_SECONDS = 5.0
"""Arming usually takes some ms, disarming 0.1 s. What takes longer is told as under way."""


class StapsdtServicer:
    """Its methods take a request and the client that was admitted: see `Admission`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.arm_seconds = _ARM_SECONDS
        self.disarm_seconds = _DISARM_SECONDS
        self._subscribers = Subscribers(backend.subscriptions, backend.gate)
        self._streams = Streams()
        self._listing = Listing(backend)
        self._files = RequestFiles(backend, self._listing)
        self._calls = OpenCalls(backend.control)
        self._watches = Watches(backend, self._listing, self._calls)

    async def stop(self) -> None:
        """End the calls that would not end by themselves, and let streams deliver what they have."""
        self._watches.stop(ServerStoppingError())
        await self._streams.finish()

    async def apply_policy(self) -> int:
        """End whatever the gate's policy no longer allows, and return the number of subscriptions ended."""
        policy = self._backend.gate.policy
        self._watches.apply(policy)
        ended = await self._backend.control.run(lambda: self._subscribers.revoke(policy))
        self._streams.apply(policy)
        return ended

    @property
    def gate(self) -> Gate:
        """What admits the calls before they get here."""
        return self._backend.gate

    async def finished(self) -> None:
        """Return when no call, cancelled ones included, has anything left to do in the control thread."""
        await self._calls.finished()
        self._listing.close()
        self._backend.files.close()

    async def GetServerInfo(  # noqa: N802
        self,
        request: pb.GetServerInfoRequest,  # noqa: ARG002
        caller: Caller,
    ) -> pb.GetServerInfoResponse:
        caller.log(logging.DEBUG, "allowed")
        return await server_info(self._backend, self._listing, caller.rights)

    def _names_for(self, users: Users) -> NamesOf | None:
        """Return what finds containers' names, for clients with a right to everybody's processes."""
        return self._backend.container_names if users is None else None

    async def _members(self, request: pb.ListProbesRequest | pb.WatchProbesRequest, caller: Caller) -> Members | None:
        names_of = self._names_for(caller.rights.list)
        return await asyncio.to_thread(members, self._backend.hierarchy, names_of, request.containers, request.cgroups)

    async def ListProbes(self, request: pb.ListProbesRequest, caller: Caller) -> bytes:  # noqa: N802
        with caller.recording_refusals():
            caller.rights.check_list()
        caller.log(logging.DEBUG, "allowed")
        selectors = await asyncio.to_thread(RequestTexts(self._backend.limits).selectors, request.selectors)
        pids = requests.parse_pids("pids", request.pids)
        among = await self._members(request, caller)
        users = caller.rights.list
        visible = await self._listing.visible_pids(users, among)
        files, files_left_out = await self._files.of_list(request, selectors, caller)
        client = caller.rights.client
        if files is None:
            objects = await self._listing.mapped(visible, users, client)
        else:
            objects = await self._listing.mapped_files(files, visible)
        # in files, other probes are listed as well
        is_mapped = bool(pids) or among is not None
        shown = [mapped for mapped in objects if mapped.pids or not is_mapped]
        listed = Listed() if request.without_probes else await self._listing.select(client, selectors, shown, pids)
        left_out = pb.ListProbesResponse(sites_left_out=listed.sites_left_out, files_left_out=files_left_out)
        answer = [left_out.SerializeToString(), *listed.probes]
        if request.moved:
            answer.append(await self._listing.moved(client, selectors, shown, pids, users))
        if request.details or request.problems:
            answer.append(await self._listing.in_turns(client, self._listing.problems(selectors, objects)))
        if request.details:
            identities = await self._listing.identities(client, sorted(listed.pids), users)
            names_of = self._names_for(users)
            ids = [identity.container_id for identity in identities]
            names = await asyncio.to_thread(names_of, ids) if names_of else {}
            answer.append(await self._listing.in_turns(client, self._listing.processes(identities, names)))
        return b"".join(answer)

    async def WatchProbes(  # noqa: N802
        self, request: pb.WatchProbesRequest, caller: Caller
    ) -> AsyncIterator[bytes]:
        with caller.recording_refusals():
            caller.rights.check_list()
            self._watches.check_quota(caller.rights)
        caller.log(logging.INFO, "allowed", selectors=_shortened(request.selectors))
        selectors = await asyncio.to_thread(RequestTexts(self._backend.limits).selectors, request.selectors)
        pids = requests.parse_pids("pids", request.pids)
        among = await self._members(request, caller)
        async with aclosing(self._watches.messages(caller, selectors, pids, among)) as messages:
            async for message in messages:
                yield message

    async def Subscribe(self, request: pb.SubscribeRequest, caller: Caller) -> bytes:  # noqa: N802
        names_of = self._names_for(caller.rights.trace)
        limits, hierarchy = self._backend.limits, self._backend.hierarchy
        texts = RequestTexts(limits, hierarchy.find)
        spec = await asyncio.to_thread(requests.spec_of, request, limits, texts, hierarchy, names_of)
        named, spec = await self._files.of_subscription(request, spec, caller)
        if spec.scope.follow:
            with caller.recording_refusals():
                caller.rights.check_trace(spec.scope.pids)
            children = await asyncio.to_thread(lambda: frozenset().union(*descendants(spec.scope.pids)))
            spec = replace(spec, children=children)
        functions = await traced_functions(self._backend, request.functions, texts, caller)
        spec = with_functions(spec, functions)
        unanswered: list[Subscription] = []

        def subscribe() -> FirstArming:
            subscription, first = self._subscribers.subscribe(spec, caller.peer, named.files, functions)
            unanswered.append(subscription)
            return first

        # if the client cancels meanwhile, it never learns the id and nobody would unsubscribe
        async with self._calls.cleanup(lambda: self._subscribers.abandon(unanswered)):
            with caller.recording_refusals():
                first = await self._backend.control.run(subscribe)
            ident = unanswered[0].id
            await asyncio.wait({asyncio.wrap_future(first.matched)})
            armed = asyncio.wrap_future(first.done)
            await asyncio.wait({armed}, timeout=self.arm_seconds)
            if armed.done():
                armed.result()
            else:
                # the statuses will tell
                armed.add_done_callback(asyncio.Future.exception)
                caller.log(logging.WARNING, "still arming", subscription=ident)
            statuses = await self._backend.control.run(lambda: self._backend.subscriptions.first_statuses(ident))
            try:
                requests.check_armed(request, statuses)
            except (NoMatchError, NotArmedError):
                # nothing is left armed when it fails
                await _end(self._backend, unanswered.pop().id, caller, self.disarm_seconds)
                raise
            caller.log(
                logging.INFO,
                "allowed",
                subscription=ident,
                selectors=_shortened([selector.text for selector in spec.selectors]),
                **({"files": _shortened(request.files)} if request.files else {}),
                sites=sum(status.state is SiteState.ARMED for status in statuses),
            )
            subscription = unanswered[0]
            sites = await self._listing.soon(
                caller.rights.client,
                serialized(
                    pb.SubscribeResponse.SITES_FIELD_NUMBER,
                    statuses,
                    lambda status: subscription_messages.site_status(subscription, status),
                ),
            )
            late = await self._listing.soon(
                caller.rights.client, subscription_messages.late_conditions(subscription, statuses)
            )
            response = pb.SubscribeResponse(
                subscription_id=ident,
                lease_seconds=spec.lease_seconds,
                engine=self._backend.engine,
                unusable_files=[pb.UnusableFile(path=path, reason=why) for path, why in named.unusable],
                evaluated_late=late,
                added_late=subscription_messages.added_late(subscription),
                instance=self._backend.instance,
            )
            unanswered.clear()
        return response.SerializeToString() + sites

    async def Stream(self, request: pb.StreamRequest, caller: Caller) -> AsyncIterator[bytes]:  # noqa: N802
        ident = request.subscription_id
        subscriptions = self._backend.subscriptions
        check_stream(request)
        subscription = self._subscribers.find(ident, caller)
        client = caller.rights.client
        turns = StreamTurns(partial(self._listing.in_turns, client), partial(self._listing.soon, client))
        stream = stream_of(subscription, request, subscriptions.collect, turns)
        async with self._calls.cleanup(lambda: subscriptions.lifetimes.stream_closed(ident)):
            with self._streams.opened(stream, caller):
                # within the cleanup: the client may cancel during this call
                await self._backend.control.run(lambda: subscriptions.lifetimes.stream_opened(ident))
                async for message in stream.messages():
                    yield message

    async def Unsubscribe(self, request: pb.UnsubscribeRequest, caller: Caller) -> pb.UnsubscribeResponse:  # noqa: N802
        check_id(request)
        self._subscribers.find(request.subscription_id, caller)
        ending, is_disarmed = await _end(self._backend, request.subscription_id, caller, self.disarm_seconds)
        clauses = await self._listing.soon(
            caller.rights.client, subscription_messages.clause_accounts(ending.subscription)
        )
        return pb.UnsubscribeResponse(
            account=subscription_messages.account(ending.subscription.account()),
            still_disarming=not is_disarmed,
            clauses=clauses,
        )

    async def ListSubscriptions(  # noqa: N802
        self,
        request: pb.ListSubscriptionsRequest,  # noqa: ARG002
        caller: Caller,
    ) -> bytes:
        caller.log(logging.DEBUG, "allowed")
        subscriptions = await self._backend.control.run(self._backend.subscriptions.all)
        usable = [each for each in subscriptions if caller.rights.may_use(each[0])]
        return await self._listing.soon(
            caller.rights.client,
            serialized(
                pb.ListSubscriptionsResponse.SUBSCRIPTIONS_FIELD_NUMBER,
                usable,
                lambda each: subscription_messages.subscription(each[0], streaming=each[1], lease_left_seconds=each[2]),
            ),
        )

    async def ListKernelFunctions(  # noqa: N802
        self, request: functions_pb.ListKernelFunctionsRequest, caller: Caller
    ) -> functions_pb.ListKernelFunctionsResponse:
        return await list_functions(self._backend, request, caller)


async def _end(backend: Backend, ident: str, caller: Caller, seconds: float) -> tuple[Ending, bool]:
    """End a subscription, and wait for some seconds until nothing is patched for it. Return whether that is so."""
    subscriptions = backend.subscriptions
    ending = await backend.control.run(lambda: subscriptions.unsubscribe(ident, EndReason.UNSUBSCRIBED))
    waited_for = [asyncio.wrap_future(future) for future in (ending.subscription.ended, ending.disarmed)]
    done, pending = await asyncio.wait(waited_for, timeout=seconds)
    for future in done:
        future.result()
    if pending:
        caller.log(logging.WARNING, "still disarming", subscription=ident)
    return ending, not pending


def _shortened(selectors: Sequence[str]) -> str:
    return " ".join(selectors)[:_LOGGED_CHARACTERS]
