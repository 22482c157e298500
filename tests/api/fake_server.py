"""A StapsdtService over a real unix socket, with probes that a test chooses and events that it fires.

It keeps the protocol's promises (replay from a sequence number, an End with the account) and can be told to break a
stream, so that what is tested is the client alone.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from stapsdtd.client import AsyncClient
from stapsdtd.v1 import kernel_functions_pb2 as functions_pb
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceServicer, add_StapsdtServiceServicer_to_server

Context = grpc.ServicerContext
PATIENCE_SECONDS = 20


def probe(provider: str = "postgresql", name: str = "query__start", **more: Any) -> pb.Probe:
    site = pb.Site(
        site_id=1,
        offset=0x1234,
        semaphore_offset=0x5678,
        function="exec_simple_query",
        arguments=[
            pb.Argument(text="8@%rdi", size=8, register=pb.RegisterOperand(name="rdi")),
            pb.Argument(
                text="-4@-20(%rbp)", size=4, signed=True, memory=pb.MemoryOperand(base="rbp", displacement=-20)
            ),
        ],
    )
    fields = {"path": "/usr/bin/postgres", "build_id": "c0ffee", "pids": [4711], "architecture": "x86-64"} | more
    return pb.Probe(provider=provider, name=name, **{"sites": [site], **fields})


def armed(site_id: int = 1, state: int = pb.SiteStatus.STATE_ARMED, reason: str = "") -> pb.SiteStatus:
    return pb.SiteStatus(
        state=state,  # type: ignore[arg-type]
        site_id=site_id,
        provider="postgresql",
        name="query__start",
        path="/usr/bin/postgres",
        offset=0x1234,
        reason=reason,
    )


def event(seq: int, values: Iterable[pb.Value] = (), **more: Any) -> pb.Event:
    fields: dict[str, Any] = {
        "time_ns": 1_700_000_000_000_000_000 + seq,
        "pid": 4711,
        "tid": 4712,
        "cpu": 1,
        "comm": "postgres",
        "site_id": 1,
    }
    return pb.Event(seq=seq, values=values, **(fields | more))


class FakeServer(StapsdtServiceServicer):
    """One subscription, `sub-1`; everything that a test may look at or change is a public attribute.

    break_after: the next stream is cut with UNAVAILABLE after so many messages.
    instance: tells one start of the server from another.
    refuse: the next request is aborted with this.
    refuse_list: ListProbes is aborted with this.
    list_waits_for: the type of a request that ListProbes waits for.
    refuse_unsubscribe: as many calls of Unsubscribe are aborted as asked too often.
    refuse_after_break: the same for the first request after a stream was cut.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.info = pb.GetServerInfoResponse(version="1.2.3", engine="ftrace", kernel_release="6.18", machine="x86_64")
        self.listing = pb.ListProbesResponse(probes=[probe()])
        self.functions = functions_pb.ListKernelFunctionsResponse()
        self.changes: list[pb.WatchProbesResponse] = []
        self.sites = [armed()]
        self.lease_seconds = 30
        self.instance = "first"
        self.late: list[pb.LateCondition] = []
        self.added_late: list[pb.LateAggregation] = []
        self.values: list[pb.Value] = [pb.Value(string=b"SELECT 1"), pb.Value(signed=42)]
        self.missing = "page not resident"
        self.account = pb.Account(sites=1)
        self.break_after: int | None = None
        self.refuse: tuple[grpc.StatusCode, str] | status_pb2.Status | None = None
        self.refuse_unsubscribe = 0
        self.refuse_list: tuple[grpc.StatusCode, str] | None = None
        self.list_waits_for = ""
        self.refuse_after_break: tuple[grpc.StatusCode, str] | status_pb2.Status | None = None
        self.requests: list[Any] = []
        self.news = threading.Condition()
        self.subscribed = False
        self.end_reason: int | None = None
        self.described = probe()
        # Events, and other messages with the sequence number before which they are sent.
        self._log: list[pb.Event] = []
        self._asides: list[tuple[int, pb.StreamResponse]] = []
        self._given = 0
        self._snapshots = 0
        self.still_disarming = False
        self._may_return = threading.Event()
        self._may_return.set()

    # What a test does

    def fire(self, count: int = 1, values: Iterable[pb.Value] | None = None, **more: Any) -> None:
        with self.news:
            for _ in range(count):
                chosen = self.values if values is None else values
                self._log.append(event(len(self._log) + 1, chosen, **more))
            self.news.notify_all()

    def tell(self, message: pb.StreamResponse) -> None:
        with self.news:
            self._asides.append((len(self._log), message))
            self.news.notify_all()

    def count(self, *rows: tuple[str, int, str, int], seconds: float = 1.0) -> None:
        """Tell a snapshot, as of `stapsdt top`. rows: a path, a pid, its name, and how many hits."""
        paths, pids, comms, counts = zip(*rows, strict=True) if rows else ((), (), (), ())
        self._snapshots += 1
        self.account.aggregated += sum(counts)
        end_ns = 1_700_000_000_000_000_000 + self._snapshots * 1_000_000_000
        self.tell(
            pb.StreamResponse(
                snapshot=pb.Snapshot(
                    number=self._snapshots,
                    begin_ns=end_ns - int(seconds * 1e9),
                    end_ns=end_ns,
                    count=len(rows),
                    keys=[
                        _texts(["postgresql"] * len(rows)),
                        _texts(["query__start"] * len(rows)),
                        _texts(paths),
                        _numbers(pids),
                        _texts(comms),
                    ],
                    values=[_numbers(counts)],
                    account=self.account,
                )
            )
        )

    def lose(self, count: int, stage: int = pb.Loss.STAGE_QUEUE) -> None:
        self.account.lost_queue += count
        self.tell(pb.StreamResponse(loss=pb.Loss(stage=stage, count=count, total=self.account.lost_queue)))  # type: ignore[arg-type]

    @contextmanager
    def hold_unsubscribe(self) -> Iterator[None]:
        """Unsubscribe does not return inside."""
        self._may_return.clear()
        try:
            yield
        finally:
            self._may_return.set()

    def end(self, reason: int) -> None:
        with self.news:
            self.end_reason = reason
            self.news.notify_all()

    def wait_for(self, condition: str) -> None:
        """Until a request of this type has come."""
        with self.news:
            assert self.news.wait_for(lambda: self.asked(condition), PATIENCE_SECONDS), f"no {condition}"

    def asked(self, kind: str) -> list[Any]:
        return [request for request in self.requests if type(request).__name__ == kind]

    # What a client asks

    def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:  # noqa: N802
        self._begin(request, context)
        return self.info

    def ListProbes(self, request: Any, context: Any) -> pb.ListProbesResponse:  # noqa: N802
        if request.without_probes:
            # commands ask that now and then, whatever else the test is about
            return pb.ListProbesResponse(moved=self.listing.moved)
        self._begin(request, context)
        if self.list_waits_for:
            self.wait_for(self.list_waits_for)
        if self.refuse_list is not None:
            context.abort(*self.refuse_list)
        return self.listing

    def WatchProbes(self, request: Any, context: Any) -> Iterator[pb.WatchProbesResponse]:  # noqa: N802
        self._begin(request, context)
        yield from self.changes
        with self.news:
            self._hang_up_with(context)
            self.news.wait_for(lambda: not context.is_active(), PATIENCE_SECONDS)

    def Subscribe(self, request: Any, context: Any) -> pb.SubscribeResponse:  # noqa: N802
        self._begin(request, context)
        self.subscribed = True
        return pb.SubscribeResponse(
            subscription_id="sub-1",
            sites=self.sites,
            lease_seconds=self.lease_seconds,
            engine="ftrace",
            evaluated_late=self.late,
            added_late=self.added_late,
            instance=self.instance,
        )

    def Stream(self, request: Any, context: Any) -> Iterator[pb.StreamResponse]:  # noqa: N802
        self._begin(request, context)
        self._hang_up_with(context)
        limit, self.break_after = self.break_after, None
        assert request.encoding == pb.StreamRequest.ENCODING_COLUMNS
        yield from islice(self._messages(request, context), limit)
        if limit is not None:
            self.refuse, self.refuse_after_break = self.refuse_after_break, None
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")

    def _messages(self, request: pb.StreamRequest, context: Any) -> Iterator[pb.StreamResponse]:
        seq = request.from_seq if request.HasField("from_seq") else self._given + 1
        captures = [
            pb.CapturedArgument(index=index, is_string=value.WhichOneof("kind") == "string", missing=self.missing)
            for index, value in enumerate(self.values)
        ]
        description = pb.Description(probe=self.described, captures=captures)
        yield pb.StreamResponse(descriptions=pb.Descriptions(probes=[description]))
        while context.is_active():
            with self.news:
                while not self._asides and len(self._log) < seq and self.end_reason is None and context.is_active():
                    self.news.wait(PATIENCE_SECONDS)
                fresh, seq = self._log[seq - 1 :], len(self._log) + 1
                asides, self._asides = self._asides, []
                ending = self.end_reason
            for place, aside in asides:
                before = [each for each in fresh if each.seq <= place]
                fresh = fresh[len(before) :]
                if before:
                    yield pb.StreamResponse(columns=columns(before))
                yield aside
            if fresh:
                yield pb.StreamResponse(columns=columns(fresh))
            self._given = max(self._given, seq - 1)
            if ending is not None:
                yield pb.StreamResponse(end=pb.End(reason=ending, account=self._account()))  # type: ignore[arg-type]
                return

    def Unsubscribe(self, request: Any, context: Any) -> pb.UnsubscribeResponse:  # noqa: N802
        self._begin(request, context)
        if self.refuse_unsubscribe:
            self.refuse_unsubscribe -= 1
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "uid 1 makes more than 5 requests a second")
        assert self._may_return.wait(PATIENCE_SECONDS)
        self.subscribed = False
        self.end(pb.End.REASON_UNSUBSCRIBED)
        return pb.UnsubscribeResponse(account=self._account(), still_disarming=self.still_disarming)

    def ListSubscriptions(self, request: Any, context: Any) -> pb.ListSubscriptionsResponse:  # noqa: N802
        self._begin(request, context)
        held = pb.Subscription(
            subscription_id="sub-1",
            selectors=["postgresql:*"],
            scope=pb.Scope(pids=[4711, 4712], execnames=["psql"]),
            where="arg1 > 5",
            account=self.account,
            streaming=True,
        )
        return pb.ListSubscriptionsResponse(subscriptions=[held] if self.subscribed else [])

    def ListKernelFunctions(self, request: Any, context: Any) -> functions_pb.ListKernelFunctionsResponse:  # noqa: N802
        self._begin(request, context)
        return self.functions

    def _begin(self, request: Any, context: Any) -> None:
        with self.news:
            self.requests.append(request)
            self.news.notify_all()
        refusal, self.refuse = self.refuse, None
        if isinstance(refusal, status_pb2.Status):
            context.abort_with_status(rpc_status.to_status(refusal))
        elif refusal:
            context.abort(*refusal)

    def _hang_up_with(self, context: Any) -> None:
        def wake() -> None:
            with self.news:
                self.news.notify_all()

        context.add_callback(wake)

    def _account(self) -> pb.Account:
        account = pb.Account()
        account.CopyFrom(self.account)
        account.delivered = self._given
        account.in_flight = len(self._log) - self._given
        account.fired = len(self._log) + account.filtered + account.lost_queue + account.aggregated
        return account


def _texts(texts: Sequence[str]) -> pb.Column:
    parts = [text.encode() for text in texts]
    ends = b"".join(sum(map(len, parts[: number + 1])).to_bytes(4, "little") for number in range(len(parts)))
    return pb.Column(type=pb.Column.TYPE_STRING, data=b"".join(parts), ends=ends)


def _numbers(numbers: Sequence[int]) -> pb.Column:
    return pb.Column(type=pb.Column.TYPE_SIGNED, data=b"".join(each.to_bytes(8, "little") for each in numbers))


def columns(events: list[pb.Event]) -> pb.Columns:
    """Events as columns; the first value that is there tells the type."""

    def array(dtype: str, numbers: Iterable[Any]) -> bytes:
        return np.array(list(numbers), dtype).tobytes()

    encoded = []
    for values in zip(*(each.values for each in events), strict=True):
        kinds = [value.WhichOneof("kind") for value in values]
        missing = array("u1", (kind == "unavailable" for kind in kinds))
        column = pb.Column(unavailable=missing if any(missing) else b"")
        match next((kind for kind in kinds if kind != "unavailable"), "signed"):
            case "string":
                column.type = pb.Column.TYPE_STRING
                column.data = b"".join(value.string for value in values)
                column.ends = array("<u4", np.cumsum([len(value.string) for value in values]))
            case "unsigned":
                column.type = pb.Column.TYPE_UNSIGNED
                column.data = array("<u8", (value.unsigned for value in values))
            case _:
                column.type = pb.Column.TYPE_SIGNED
                column.data = array("<i8", (value.signed for value in values))
        encoded.append(column)
    block = pb.ColumnBlock(
        count=len(events),
        seq=array("<u8", (each.seq for each in events)),
        time_ns=array("<i8", (each.time_ns for each in events)),
        pid=array("<i4", (each.pid for each in events)),
        tid=array("<i4", (each.tid for each in events)),
        cpu=array("<u2", (each.cpu for each in events)),
        comm=array("S16", (each.comm.encode() for each in events)),
        site_id=array("<u4", (each.site_id for each in events)),
        values=encoded,
    )
    return pb.Columns(blocks=[block], next_seq=events[-1].seq + 1)


def bad_request(field: str, description: str) -> status_pb2.Status:
    detail = any_pb2.Any()
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status_pb2.Status(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], message="bad request", details=[detail])


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server on a socket whose path is short enough for any temporary directory's name."""
    with tempfile.TemporaryDirectory(prefix="fake") as directory, ThreadPoolExecutor(8) as threads:
        fake = FakeServer(f"unix:{directory}/sock")
        server = grpc.server(threads)
        add_StapsdtServiceServicer_to_server(fake, server)
        server.add_insecure_port(fake.target)
        server.start()
        try:
            yield fake
        finally:
            server.stop(grace=None).wait()


def run(server: FakeServer, test: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Run a test of an asyncio client in an event loop of its own."""

    async def connected() -> None:
        async with AsyncClient(server.target) as client:
            await test(client)

    asyncio.run(connected())
