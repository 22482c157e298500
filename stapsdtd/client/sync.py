"""The client for ordinary code. `aio.py` is its twin: what differs is only how a call is waited for."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Self

import grpc

from stapsdtd.client import decode, encode
from stapsdtd.client.errors import Call, NotFoundError, ServerUnavailableError, translated
from stapsdtd.client.model import ColumnBatch, Encoding, End, EventBatch, Interruption
from stapsdtd.client.stream import RefusedUnsubscribe, Retry, SubscriptionState, closed_without_end
from stapsdtd.client.target import Tls, resolved
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
    """A connection to stapsdtd, opened when it is first used; a context manager that closes it.

    target: `unix:PATH` of the server's socket, or `tcp:HOST:PORT`.
    tls: for TCP, which only on loopback may go without.
    timeout_seconds: how long any answer may take before ServerTimeoutError; streams have no limit.

    Selectors are one string or several. Every method raises ClientError.
    """

    def __init__(self, target: str, *, tls: Tls | None = None, timeout_seconds: float = 60.0) -> None:
        """Raises InvalidTargetError."""
        address, credentials = resolved(target, tls)
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

    def _call(self, what: str) -> Call:
        return Call(what, self._target, self._timeout)

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
        """The probes in objects that living processes, or those of pids, map now. No selector means all.

        containers, cgroups: processes elsewhere are left out; both are as in subscribe.
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
        """The same, then SnapshotComplete, then every appearance and disappearance."""
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
        """Arms all that matches and, later, whatever appears. 0 means the server's default.

        pids, uids, execnames, cgroups, containers: whose events are wanted, everybody's where all are empty; of each
        kind that is given one has to be met. A cgroup's path is that of /proc/PID/cgroup. A container goes by its name,
        its id or the id's first 12 digits, and has to be there. What is below a cgroup or a container counts too.
        include_clients: events of the server's other clients, which by default count as filtered; see the proto.
        where: an expression such as `arg0 > 100 && execname != "psql"`; see the README.
        lease_seconds: how long the subscription lives without a stream.
        queue_bytes: how much the server keeps for this client.
        kernel_buffer_kib: the kernel's buffer, per CPU.
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
        with translated(self._call(f"subscribe to {encode.shown(request.selectors)}")):
            response = self._stub.Subscribe(request, timeout=self._timeout)
        return Subscription(self._stub, response, self._target, self._timeout)

    def subscriptions(self) -> tuple[SubscriptionInfo, ...]:
        """All subscriptions on the server, other clients' too."""
        with translated(self._call("list subscriptions")):
            response = self._stub.ListSubscriptions(pb.ListSubscriptionsRequest(), timeout=self._timeout)
        return tuple(map(decode.subscription_info, response.subscriptions))


class Subscription(SubscriptionState):
    """Armed probes and their events; a context manager that unsubscribes.

    Iterate over events(), columns() or messages(), one of them at a time. A stream that breaks is opened anew
    while the lease lasts. A later call goes on after the last event that the former one gave, unless from_seq
    says otherwise.
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
        # Who is not there any more needs no good-bye: the subscription is gone or its lease ends it.
        with suppress(NotFoundError, ServerUnavailableError):
            self.unsubscribe()

    def events(self, from_seq: int | None = None) -> Iterator[Event]:
        """One object an event, to the stream's end; `lost`, `sites` and `account` are kept up to date."""
        with closing(self.messages(Encoding.ROWS, from_seq)) as messages:
            for message in messages:
                if isinstance(message, EventBatch):
                    for event in message.events:
                        self.next_seq = event.seq + 1
                        yield event

    def columns(self, from_seq: int | None = None) -> Iterator[ColumnBatch]:
        """Batches of events as numpy arrays, to the stream's end.

        A batch holds events whose values have the same types, so the sequence numbers of neighbouring batches may
        interleave.
        """
        with closing(self.messages(Encoding.COLUMNS, from_seq)) as messages:
            for message in messages:
                if isinstance(message, ColumnBatch):
                    yield message

    def messages(
        self, encoding: Encoding = Encoding.ROWS, from_seq: int | None = None
    ) -> Generator[Message, None, None]:
        """Everything that the stream tells, in its order; ends after an End."""
        self.next_seq = self.next_seq if from_seq is None else from_seq
        retry = Retry(Call(f"stream subscription {self.id}", self._target), self.lease_seconds)
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
                pause, news = retry.after(error)
            finally:
                call.cancel()
            if news:
                yield Interruption(news)
            time.sleep(pause)

    def unsubscribe(self) -> Account:
        """Disarms. An open stream still delivers what is in flight in the account, then ends.

        Tried again for some seconds where this client asks too often; then StillSubscribedError is raised.
        """
        if self.account is not None:
            return self.account
        retry = RefusedUnsubscribe(Call(f"unsubscribe {self.id}", self._target, self._timeout), self.lease_seconds)
        while True:
            try:
                request = encode.unsubscribe_request(self.id)
                response = self._stub.Unsubscribe(request, timeout=self._timeout)
                return self._unsubscribed(response)
            except grpc.RpcError as error:
                pause = retry.after(error)
            time.sleep(pause)
