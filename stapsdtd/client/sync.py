"""The blocking client. `aio.py` is the same for asyncio; keep the two in step."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Self

import grpc

from stapsdtd.client import decode, encode
from stapsdtd.client.errors import Call, NotFoundError, ServerUnavailableError, translated
from stapsdtd.client.model import ColumnBatch, Encoding, End, EventBatch, Interruption
from stapsdtd.client.stream import StreamRetry, SubscriptionState, UnsubscribeRetry, closed_without_end
from stapsdtd.client.target import Tls, resolve
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from types import TracebackType

    from stapsdtd.client.encode import Selectors
    from stapsdtd.client.model import (
        Account,
        Event,
        Message,
        ProbeListing,
        ServerInfo,
        SubscriptionInfo,
        WatchMessage,
    )


class Client:
    """A connection to stapsdtd, opened on first use. A context manager that closes it on exit.

    target: the server's address, `unix:PATH` or `tcp:HOST:PORT`.
    tls: required for TCP, except on loopback.
    timeout_seconds: how long to wait for a response before raising ServerTimeoutError; streams have no limit.

    Selectors are given as one string or several. Every method raises ClientError.
    """

    def __init__(self, target: str, *, tls: Tls | None = None, timeout_seconds: float = 60.0) -> None:
        """Raises InvalidTargetError."""
        address, credentials = resolve(target, tls)
        self._channel = (
            grpc.secure_channel(address, credentials, options=encode.CHANNEL_OPTIONS)
            if credentials
            else grpc.insecure_channel(address, options=encode.CHANNEL_OPTIONS)
        )
        self._stub = StapsdtServiceStub(self._channel)
        self._target = target
        self._timeout = timeout_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def _call(self, operation: str) -> Call:
        return Call(operation, self._target, self._timeout)

    def info(self) -> ServerInfo:
        with translated(self._call("get server info")):
            return decode.server_info(self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=self._timeout))

    def list_probes(
        self,
        selectors: Selectors = (),
        pids: Iterable[int] = (),
        *,
        containers: Iterable[str] = (),
        cgroups: Iterable[str] = (),
        details: bool = False,
    ) -> ProbeListing:
        """Return the probes in objects that running processes map. Without a selector, all probes.

        pids, containers, cgroups: consider only these processes; as for subscribe().
        details: also return the processes, and the notes and files that could not be used.
        """
        request = encode.list_request(selectors, pids, containers=containers, cgroups=cgroups, details=details)
        with translated(self._call("list probes")):
            return decode.probe_listing(self._stub.ListProbes(request, timeout=self._timeout))

    def watch_probes(
        self,
        selectors: Selectors = (),
        pids: Iterable[int] = (),
        *,
        containers: Iterable[str] = (),
        cgroups: Iterable[str] = (),
    ) -> Iterator[WatchMessage]:
        """Yield the same probes as list_probes(), then SnapshotComplete, then probes as they appear and disappear."""
        call = self._stub.WatchProbes(encode.watch_request(selectors, pids, containers=containers, cgroups=cgroups))
        try:
            with translated(Call("watch probes", self._target)):
                for change in call:
                    yield decode.watch_message(change)
        finally:
            call.cancel()

    def subscribe(
        self,
        selectors: Selectors,
        *,
        pids: Iterable[int] = (),
        exclude_pids: Iterable[int] = (),
        uids: Iterable[int] = (),
        execnames: Iterable[str] = (),
        cgroups: Iterable[str] = (),
        containers: Iterable[str] = (),
        include_clients: bool = False,
        where: str = "",
        lease_seconds: int = 0,
        queue_bytes: int = 0,
        kernel_buffer_kib: int = 0,
    ) -> Subscription:
        """Arm all probes that match, and later every new one that does.

        pids, uids, execnames, cgroups, containers: deliver only events of these processes and threads. Values of one
        argument are combined with OR, different arguments with AND; empty ones do not restrict. cgroups are paths as in
        /proc/PID/cgroup; containers are names, ids, or at least the first 12 digits of an id. Both must exist, and
        include everything below them.
        exclude_pids: never deliver events of these processes.
        include_clients: deliver events of the server's other clients too, which by default count as filtered.
        where: a filter expression such as `arg0 > 100 && execname != "psql"`; see the README.
        lease_seconds: how long the subscription lives without a stream.
        queue_bytes: how much the server buffers for this client.
        kernel_buffer_kib: size of the kernel buffer per CPU.

        For the last three, 0 means the server's default.
        """
        request = encode.subscribe_request(
            selectors,
            pids=pids,
            exclude_pids=exclude_pids,
            uids=uids,
            execnames=execnames,
            cgroups=cgroups,
            containers=containers,
            include_clients=include_clients,
            where=where,
            lease_seconds=lease_seconds,
            queue_bytes=queue_bytes,
            kernel_buffer_kib=kernel_buffer_kib,
        )
        with translated(self._call(f"subscribe to {encode.shortened(request.selectors)}")):
            response = self._stub.Subscribe(request, timeout=self._timeout)
        return Subscription(self._stub, response, self._target, self._timeout)

    def subscriptions(self) -> tuple[SubscriptionInfo, ...]:
        """Return this client's subscriptions, or everybody's if its role may manage them."""
        with translated(self._call("list subscriptions")):
            response = self._stub.ListSubscriptions(pb.ListSubscriptionsRequest(), timeout=self._timeout)
        return tuple(map(decode.subscription_info, response.subscriptions))


class Subscription(SubscriptionState):
    """Armed probes and their events. A context manager that unsubscribes on exit.

    Iterate over events(), columns() or messages(), one of them at a time. A broken stream is reopened until the lease
    expires. Each call resumes after the last event returned by the previous one, unless from_seq is given.
    """

    def __init__(self, stub: StapsdtServiceStub, response: pb.SubscribeResponse, target: str, timeout: float) -> None:
        super().__init__(response)
        self._stub = stub
        self._target = target
        self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The subscription is gone already, or its lease will end it.
        with suppress(NotFoundError, ServerUnavailableError):
            self.unsubscribe()

    def events(self, from_seq: int | None = None) -> Iterator[Event]:
        """Yield events until the stream ends, keeping `lost`, `sites` and `account` up to date."""
        with closing(self.messages(Encoding.ROWS, from_seq)) as messages:
            for message in messages:
                if isinstance(message, EventBatch):
                    for event in message.events:
                        self.next_seq = event.seq + 1
                        yield event

    def columns(self, from_seq: int | None = None) -> Iterator[ColumnBatch]:
        """Yield batches of events as numpy arrays until the stream ends.

        All events of a batch have values of the same types, so the sequence numbers of adjacent batches may interleave.
        """
        with closing(self.messages(Encoding.COLUMNS, from_seq)) as messages:
            for message in messages:
                if isinstance(message, ColumnBatch):
                    yield message

    def messages(
        self, encoding: Encoding = Encoding.ROWS, from_seq: int | None = None
    ) -> Generator[Message, None, None]:
        """Yield everything that the stream carries, in order; the last message is an End."""
        self.next_seq = self.next_seq if from_seq is None else from_seq
        retry = StreamRetry(Call(f"stream subscription {self.id}", self._target), self.lease_seconds)
        while True:
            call = self._stub.Stream(encode.stream_request(self.id, self.next_seq))
            try:
                for response in call:
                    retry.succeeded()
                    for message in self._read(response, encoding):
                        yield message
                        if isinstance(message, End):
                            return
                raise closed_without_end()
            except grpc.RpcError as error:
                pause, interruption = retry.after(error)
            finally:
                call.cancel()
            if interruption:
                yield Interruption(interruption)
            time.sleep(pause)

    def unsubscribe(self) -> Account:
        """Disarm the probes and return the account. An open stream still delivers the events in flight, then ends.

        Retries for a few seconds if the client exceeds its request quota, then raises StillSubscribedError.
        """
        if self.account is not None:
            return self.account
        retry = UnsubscribeRetry(Call(f"unsubscribe {self.id}", self._target, self._timeout), self.lease_seconds)
        while True:
            try:
                request = encode.unsubscribe_request(self.id)
                response = self._stub.Unsubscribe(request, timeout=self._timeout)
                return self._unsubscribed(response)
            except grpc.RpcError as error:
                pause = retry.after(error)
            time.sleep(pause)
