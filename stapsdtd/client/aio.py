"""The asyncio client.

`sync.py`, the blocking client, is generated from this file by proto/generate.py: the same code without `async` and
`await`. It has gRPC's blocking stubs rather than an event loop of its own, so that any thread may call it, also one
that runs a loop already.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, Unpack

import grpc
import grpc.aio

from stapsdtd.client import decode, encode, kernel_functions
from stapsdtd.client.column_batch import ColumnBatch
from stapsdtd.client.entering import entering
from stapsdtd.client.errors import Call, CallCancelledError, NotFoundError, ServerUnavailableError, translated
from stapsdtd.client.messages import Encoding, End, EventBatch, Interruption
from stapsdtd.client.restarts import RESTART_SECONDS
from stapsdtd.client.retries import StreamRetry, UnsubscribeRetry
from stapsdtd.client.snapshots import Snapshot
from stapsdtd.client.stream import SubscriptionState
from stapsdtd.client.streaming import Groups, IdleTimer, one_by_one
from stapsdtd.client.target import Tls, resolve
from stapsdtd.client.watching import WatchedProbes
from stapsdtd.subscribe_options import SubscribeOptions
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from stapsdtd.client.encode import Selectors
    from stapsdtd.client.idle import FromSeq, Waiting
    from stapsdtd.client.kernel_functions import FunctionListing
    from stapsdtd.client.messages import Event, Message, Resubscribed
    from stapsdtd.client.probes import MovedText, ProbeListing, WatchMessage
    from stapsdtd.client.server import Account, ServerInfo, SubscriptionInfo
    from stapsdtd.subscribe_options import Aggregate, Clause, Span
    from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceAsyncStub

_DEFAULTS = SubscribeOptions()
_ONE_CLAUSE: Mapping[str, Aggregate | None] = MappingProxyType({"": None})


class AsyncClient:
    """A connection to stapsdtd, opened on first use. An async context manager that closes it on exit.

    target: the server's address, `unix:PATH` or `tcp:HOST:PORT`.
    tls: required for TCP, except on loopback.
    timeout_seconds: how long to wait for a response before raising ServerTimeoutError; streams have no limit.

    Selectors are given as one string or several. Every method raises ClientError.
    """

    def __init__(self, target: str, *, tls: Tls | None = None, timeout_seconds: float = 60.0) -> None:
        """Raises InvalidTargetError."""
        address, credentials = resolve(target, tls)
        self._channel = (
            grpc.aio.secure_channel(address, credentials, options=encode.CHANNEL_OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(address, options=encode.CHANNEL_OPTIONS)
        )
        self._stub = StapsdtServiceStub(self._channel)
        self._target = target
        self._timeout = timeout_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    def _call(self, operation: str) -> Call:
        return Call(operation, self._target, self._timeout)

    async def info(self) -> ServerInfo:
        with translated(self._call("get server info")):
            return decode.server_info(await self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=self._timeout))

    async def list_probes(
        self,
        selectors: Selectors = (),
        pids: Iterable[int] = (),
        *,
        containers: Iterable[str] = (),
        cgroups: Iterable[str] = (),
        files: Iterable[str] = (),
        installed: bool = False,
        details: bool = False,
        problems: bool = False,
        moved: bool = False,
    ) -> ProbeListing:
        """Return the probes in objects that running processes map. Without a selector, all probes.

        pids, containers, cgroups: consider only these processes; as for subscribe().
        files: only probes in these files, whether or not a process maps them; as for subscribe().
        installed: only probes in installed files that the server knows of, whether or not a process maps them.
        details: also return the processes, and the notes that cannot be used.
        problems: also return the notes that cannot be used.
        moved: also return which processes execute copies of the probes' text; see moved_text().
        """
        request = encode.list_request(
            selectors,
            pids,
            containers=containers,
            cgroups=cgroups,
            files=files,
            installed=installed,
            details=details,
            problems=problems,
            moved=moved,
        )
        with translated(self._call("list probes")):
            return decode.probe_listing(await self._stub.ListProbes(request, timeout=self._timeout))

    async def moved_text(
        self,
        selectors: Selectors = (),
        pids: Iterable[int] = (),
        *,
        containers: Iterable[str] = (),
        cgroups: Iterable[str] = (),
        files: Iterable[str] = (),
    ) -> Sequence[MovedText]:
        """Return which processes execute copies of text that has probes, where these never fire.

        As list_probes(), without the probes.
        """
        request = encode.list_request(
            selectors, pids, containers=containers, cgroups=cgroups, files=files, moved=True, without_probes=True
        )
        with translated(self._call("look for moved text")):
            return decode.probe_listing(await self._stub.ListProbes(request, timeout=self._timeout)).moved

    @one_by_one
    async def watch_probes(
        self,
        selectors: Selectors = (),
        pids: Iterable[int] = (),
        *,
        containers: Iterable[str] = (),
        cgroups: Iterable[str] = (),
        resubscribe: bool = False,
    ) -> Groups[WatchMessage]:
        """Yield the same probes as list_probes(), then SnapshotComplete, then probes as they appear and disappear.

        resubscribe: if the stream breaks, or the server is restarted, which is waited for, for two minutes at most,
            yield an Interruption, a Resubscribed without an account, and what has changed meanwhile.
        """
        request = encode.watch_request(selectors, pids, containers=containers, cgroups=cgroups)
        watched = WatchedProbes()
        retry = StreamRetry(Call("watch probes", self._target), RESTART_SECONDS)
        while True:
            call = self._stub.WatchProbes(request)
            try:
                async for change in call:
                    retry.succeeded()
                    yield watched.read(decode.watch_message(change))
                break
            except grpc.RpcError as error:
                pause, told = retry.after(error) if resubscribe else retry.no_more(error)
            finally:
                call.cancel()
            watched.interrupted()
            if told:
                yield (Interruption(told, retry.seconds),)
            await asyncio.sleep(pause)

    @entering
    async def subscribe(
        self, selectors: Selectors, options: SubscribeOptions = _DEFAULTS, span: Span | None = None
    ) -> AsyncSubscription:
        """Arm all probes that match, and later every new one that does.

        span: pair their hits with earlier ones of other probes; events are the pairs.
        """
        request = encode.subscribe_request(selectors, options, span)
        with translated(self._call(f"subscribe to {encode.shortened(encode.selectors_of(request))}")):
            response = await self._stub.Subscribe(request, timeout=self._timeout)
        return AsyncSubscription(self._stub, request, response, self._target, self._timeout)

    @entering
    async def aggregate(
        self,
        selectors: Selectors,
        aggregate: Aggregate,
        options: SubscribeOptions = _DEFAULTS,
        span: Span | None = None,
    ) -> AsyncSubscription:
        """Arm all probes that match, and have the server compute of their hits what snapshots() yields.

        span: as for subscribe(), to compute something of the pairs, such as of `elapsed`.

        Raises InvalidAggregateError, too.
        """
        request = encode.aggregate_request(selectors, aggregate, options, span)
        with translated(self._call(f"subscribe to {encode.shortened(encode.selectors_of(request))}")):
            response = await self._stub.Subscribe(request, timeout=self._timeout)
        return AsyncSubscription(self._stub, request, response, self._target, self._timeout, {"": aggregate})

    @entering
    async def query(self, clauses: Iterable[Clause], options: SubscribeOptions = _DEFAULTS) -> AsyncSubscription:
        """Arm all probes that match any of some clauses, and do at their hits what each clause says.

        options: of all clauses. What the stream carries has the clause's `tag`; events of different clauses are not in
        one order.

        Raises InvalidAggregateError, too.
        """
        asked = tuple(clauses)
        request = encode.clauses_request(asked, options)
        with translated(self._call(f"subscribe to {encode.shortened(encode.selectors_of(request))}")):
            response = await self._stub.Subscribe(request, timeout=self._timeout)
        aggregates = {clause.tag: clause.aggregate for clause in asked}
        return AsyncSubscription(self._stub, request, response, self._target, self._timeout, aggregates)

    async def kernel_functions(self, functions: Selectors, *, types: bool = False) -> FunctionListing:
        """Return functions of the kernel, with their types and why one cannot be attached to.

        functions: `NAME`, `MODULE:NAME`, both globs, or `NAME(VALUE, ...)`; a value is an argument, members of it, or
        `return`, and what is told of it is its type and where it lies. types: give each value its `shape`, to print it.
        """
        request = kernel_functions.list_request(functions, types=types)
        with translated(self._call("list kernel functions")):
            return kernel_functions.listing(await self._stub.ListKernelFunctions(request, timeout=self._timeout))

    async def kernel_function_names(self, functions: Selectors) -> tuple[str, ...]:
        """Return the names of at most a thousand functions, sorted."""
        request = kernel_functions.list_request(functions, names_only=True)
        with translated(self._call("list kernel functions")):
            return tuple((await self._stub.ListKernelFunctions(request, timeout=self._timeout)).names)

    async def subscriptions(self) -> tuple[SubscriptionInfo, ...]:
        """Return this client's subscriptions, or everybody's if its role may manage them."""
        with translated(self._call("list subscriptions")):
            response = await self._stub.ListSubscriptions(pb.ListSubscriptionsRequest(), timeout=self._timeout)
        return tuple(map(decode.subscription_info, response.subscriptions))


class AsyncSubscription(SubscriptionState):
    """Armed probes and their events. An async context manager that unsubscribes on exit.

    Iterate over events(), columns(), snapshots() or messages(), one of them at a time. A broken stream is reopened
    until the lease expires. Each call resumes after what the previous one returned last, unless from_seq is given.

    waiting: for how long, and after what; see `Waiting`.
    """

    def __init__(  # noqa: PLR0917 - what a client knows of it
        self,
        stub: StapsdtServiceAsyncStub,
        request: pb.SubscribeRequest,
        response: pb.SubscribeResponse,
        target: str,
        timeout: float,
        aggregates: Mapping[str, Aggregate | None] = _ONE_CLAUSE,
    ) -> None:
        super().__init__(request, response, target, aggregates)
        self._stub = stub
        self._target = target
        self._timeout = timeout
        self._opened: grpc.aio.UnaryStreamCall[pb.StreamRequest, pb.StreamResponse] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            self._opened.cancel()
        # The subscription is gone already, or its lease will end it.
        with suppress(NotFoundError, ServerUnavailableError):
            await self.unsubscribe()

    def open_stream(self) -> None:
        """Open the stream that messages() and the others read at first, so that the lease does not run until then."""
        self._opened = self._stub.Stream(encode.stream_request(self.id, self.positions))

    @one_by_one
    async def events(self, from_seq: FromSeq = None, **waiting: Unpack[Waiting]) -> Groups[Event]:
        """Yield events until the stream ends, keeping `lost`, `sites` and `account` up to date.

        Raises AllRefusedError if sites match, and all of them are refused: `messages` waits for others to appear.
        """
        self._check_refused()
        async with aclosing(self._groups(Encoding.ROWS, from_seq, EventBatch, **waiting)) as groups:
            async for messages in groups:
                yield self._events(messages)

    @one_by_one
    async def columns(self, from_seq: FromSeq = None, **waiting: Unpack[Waiting]) -> Groups[ColumnBatch]:
        """Yield batches of events as numpy arrays until the stream ends.

        All events of a batch have values of the same types, so the sequence numbers of adjacent batches may interleave.
        Raises AllRefusedError, as `events` does.
        """
        self._check_refused()
        async with aclosing(self._groups(Encoding.COLUMNS, from_seq, ColumnBatch, **waiting)) as groups:
            async for messages in groups:
                yield (message for message in messages if isinstance(message, ColumnBatch))

    @one_by_one
    async def snapshots(self, **waiting: Unpack[Waiting]) -> Groups[Snapshot]:
        """Yield the snapshots of an aggregation until the stream ends; the last one covers the time until then."""
        async with aclosing(self._groups(Encoding.COLUMNS, None, Snapshot, **waiting)) as groups:
            async for messages in groups:
                yield (message for message in messages if isinstance(message, Snapshot))

    @one_by_one
    def messages(
        self, encoding: Encoding = Encoding.ROWS, from_seq: FromSeq = None, **waiting: Unpack[Waiting]
    ) -> Groups[Message]:
        """Yield everything that the stream carries, in order; the last message is an End, unless it was idle.

        from_seq: the first number to send, of events or snapshots; of each clause, or by its tag.
        """
        return self._groups(encoding, from_seq, object, **waiting)

    async def _groups(
        self, encoding: Encoding, from_seq: FromSeq, awaited: type[object], **waiting: Unpack[Waiting]
    ) -> AsyncGenerator[Iterator[Message], None]:
        """Yield the messages of each response. awaited: those of which none comes while the stream is idle."""
        self._resume_at(from_seq)
        if from_seq is not None and self._opened is not None:
            # it begins elsewhere
            self._opened.cancel()
            self._opened = None
        resubscribe = waiting.get("resubscribe", False)
        seconds = max(self.lease_seconds, RESTART_SECONDS) if resubscribe else self.lease_seconds
        retry = StreamRetry(Call(f"stream subscription {self.id}", self._target), seconds)
        with IdleTimer(waiting.get("idle_seconds")) as idle:
            while not idle.is_over():
                opened, self._opened = self._opened, None
                call = opened or self._stub.Stream(encode.stream_request(self.id, self.positions))
                idle.watch(call)
                try:
                    async for response in idle.limited(call):
                        retry.succeeded()
                        messages = self._read(response, encoding)
                        is_last = any(isinstance(message, End) for message in messages)
                        if is_last and self.is_down and resubscribe:
                            # the wait for the server is the stream's, and no work of the reader's
                            idle.resume()
                            break
                        if any(isinstance(message, awaited) for message in messages):
                            idle.heard()
                        yield self._taken(response, messages)
                        if is_last:
                            return
                    if idle.is_over():
                        return
                    failure = self._stopped(retry)
                except grpc.RpcError as error:
                    failure = self._failed(retry, error, resubscribe=resubscribe)
                finally:
                    call.cancel()
                self._resume_at(None)
                if failure.told:
                    yield iter((Interruption(failure.told, retry.seconds),))
                if failure.is_gone:
                    if message := await self._subscribe_again(retry, idle):
                        yield iter((message,))
                    if self._has_ended():
                        return
                else:
                    await asyncio.sleep(failure.pause)

    async def _subscribe_again(self, retry: StreamRetry, idle: IdleTimer) -> Resubscribed | End | None:
        """Return an End if there is nothing to subscribe to any more, and None if it was idle for too long."""
        while not idle.is_over():
            if self._is_left():
                return self._ended_before()
            request = self._again.request()
            if request is None:
                return self._all_ended()
            try:
                response = await self._stub.Subscribe(request, timeout=self._timeout)
            except grpc.RpcError as error:
                # it may be stopping, which ends what was about to be armed
                pause, _ = retry.after(error, CallCancelledError, NotFoundError)
            else:
                if not self._is_left() and not self._again.is_of_same_server(response):
                    restart = self._begin_again(response)
                    self.open_stream()
                    return restart
                with suppress(grpc.RpcError):
                    unwanted = encode.unsubscribe_request(response.subscription_id)
                    await self._stub.Unsubscribe(unwanted, timeout=self._timeout)
                return self._ended_before()
            await asyncio.sleep(pause)
        return None

    async def unsubscribe(self) -> Account:
        """Disarm the probes and return the account. An open stream still delivers the events in flight, then ends.

        Retries for a few seconds if the client exceeds its request quota, then raises StillSubscribedError.
        """
        self._is_unsubscribed = True
        if self.account is not None:
            return self.account
        retry = UnsubscribeRetry(Call(f"unsubscribe {self.id}", self._target, self._timeout), self.lease_seconds)
        while True:
            try:
                request = encode.unsubscribe_request(self.id)
                response = await self._stub.Unsubscribe(request, timeout=self._timeout)
                return self._unsubscribed(response)
            except grpc.RpcError as error:
                pause = retry.after(error)
            await asyncio.sleep(pause)
