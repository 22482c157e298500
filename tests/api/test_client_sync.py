"""The synchronous client against a server on a real socket."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc
import pytest

from stapsdtd.client import (
    AllRefusedError,
    Client,
    Constant,
    Descriptions,
    End,
    EndReason,
    EventBatch,
    Interruption,
    InvalidRequestError,
    Loss,
    LossStage,
    Memory,
    NotFoundError,
    NumberColumn,
    ProbeAdded,
    ProbeRemoved,
    ProtocolError,
    Register,
    ServerTimeoutError,
    ServerUnavailableError,
    SiteState,
    SnapshotComplete,
    Status,
    StillSubscribedError,
    StreamTakenOverError,
    StringColumn,
    SubscribeOptions,
    UnsupportedError,
    Violation,
)
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.fake_server import FakeServer, armed, bad_request, columns, event, probe, serving


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.target) as connection:
        yield connection


def test_info(server: FakeServer, client: Client) -> None:
    server.info.features.add(name="tracefs", available=True, detail="at /sys/kernel/tracing")
    server.info.limits.max_selectors = 64
    info = client.info()
    assert (info.version, info.engine, info.limits.max_selectors) == ("1.2.3", "ftrace", 64)
    assert info.features[0].name == "tracefs"


def test_list_probes(server: FakeServer, client: Client) -> None:
    server.listing.processes.add(pid=4711, comm="postgres", cgroup="/docker/c0ffee", container_id="c", namespace_pid=7)
    server.listing.processes[0].container_name = "shop/db"
    server.listing.processes.add(pid=4712)
    listing = client.list_probes("postgresql:*", pids=[4711], containers=["web"], cgroups=["/a"], details=True)
    assert server.asked("ListProbesRequest") == [
        pb.ListProbesRequest(selectors=["postgresql:*"], pids=[4711], containers=["web"], cgroups=["/a"], details=True)
    ]
    (found,) = listing
    assert (found.provider, found.name, found.build_id, found.pids) == ("postgresql", "query__start", "c0ffee", (4711,))
    (site,) = found.sites
    assert (site.offset, site.semaphore_offset, site.function) == (0x1234, 0x5678, "exec_simple_query")
    assert [argument.operand for argument in site.arguments] == [Register("rdi", 0), Memory("rbp", -20)]
    inside, outside = listing.processes
    assert (inside.comm, inside.cgroup, inside.container_id, inside.container_name, inside.namespace_pid) == (
        "postgres", "/docker/c0ffee", "c", "shop/db", 7,
    )  # fmt: skip
    assert (outside.cgroup, outside.container_id, outside.container_name) == (None, None, None)
    assert outside.namespace_pid == 4712


def test_what_is_empty_is_none(server: FakeServer, client: Client) -> None:
    constant = pb.Argument(text="-4@$-7", size=4, signed=True, constant=-7)
    server.listing = pb.ListProbesResponse(probes=[probe(build_id="", sites=[pb.Site(offset=1, arguments=[constant])])])
    (found,) = client.list_probes()
    assert found.build_id is None
    assert found.sites[0].semaphore_offset is None
    assert found.sites[0].function is None
    assert found.sites[0].arguments[0].operand == Constant(-7)


def test_watch_probes(server: FakeServer, client: Client) -> None:
    kinds = pb.WatchProbesResponse
    server.changes = [
        kinds(change=kinds.CHANGE_ADDED, probe=probe()),
        kinds(change=kinds.CHANGE_SNAPSHOT_COMPLETE),
        kinds(change=kinds.CHANGE_REMOVED, probe=probe()),
    ]
    first, second, third = islice(client.watch_probes("*:*", containers=["web"], cgroups=["/a"]), 3)
    assert server.asked("WatchProbesRequest") == [
        pb.WatchProbesRequest(selectors=["*:*"], containers=["web"], cgroups=["/a"])
    ]
    assert isinstance(first, ProbeAdded)
    assert isinstance(second, SnapshotComplete)
    assert isinstance(third, ProbeRemoved)
    assert third.probe.name == "query__start"


def test_events(server: FakeServer, client: Client) -> None:
    scope: dict[str, Any] = {
        "pids": [1], "exclude_pids": [2], "uids": [3], "execnames": ["a"], "cgroups": ["/c"], "containers": ["web"],
        "include_clients": True,
    }  # fmt: skip
    options = SubscribeOptions(**scope, where="arg0", lease_seconds=9, queue_bytes=8)
    with client.subscribe(["postgresql:*"], options) as subscription:
        (request,) = server.asked("SubscribeRequest")
        assert request.scope == pb.Scope(**scope)
        assert request.where == "arg0"
        assert (request.lease_seconds, request.queue_bytes, request.kernel_buffer_kib) == (9, 8, 0)
        assert [site.state for site in subscription.sites] == [SiteState.ARMED]
        server.fire(3)
        server.end(pb.End.REASON_UNSUBSCRIBED)
        events = list(subscription.events())
        assert subscription.account is not None
        assert subscription.account.delivered == 3
    assert [event.seq for event in events] == [1, 2, 3]
    assert events[0].values == ("SELECT 1", 42)
    assert (events[0].pid, events[0].tid, events[0].cpu, events[0].comm) == (4711, 4712, 1, "postgres")
    assert events[0].probe.name == "query__start"
    assert events[0].site.offset == 0x1234
    assert not server.asked("UnsubscribeRequest"), "an ended subscription needs no farewell"


def test_bytes_that_are_no_text_are_escaped(server: FakeServer, client: Client) -> None:
    server.fire(values=[pb.Value(string=b"caf\xc3\xa9 \xff"), pb.Value(unsigned=2**64 - 1)])
    with client.subscribe("*:*") as subscription:
        (only,) = islice(subscription.events(), 1)
    assert only.values == ("café \\xff", 2**64 - 1)


def test_a_value_that_is_unavailable_is_none_and_says_why(server: FakeServer, client: Client) -> None:
    server.fire(values=[pb.Value(signed=1), pb.Value(unavailable="page not resident")])
    with client.subscribe("*:*") as subscription:
        (only,) = islice(subscription.events(), 1)
    assert only.values == (1, None)
    assert only.unavailable == {1: "page not resident"}


def test_who_waits_for_events_is_told_that_no_site_is_armed(server: FakeServer, client: Client) -> None:
    server.sites = [armed(number, pb.SiteStatus.STATE_REFUSED, f"no room {number}") for number in (1, 2)]
    with client.subscribe("*:*") as subscription:
        for reading in (subscription.events, subscription.columns):
            with pytest.raises(AllRefusedError) as raised:
                next(iter(reading()))
            assert str(raised.value) == "every site that matches was refused: no room 1, and 1 more"
            assert raised.value.reasons == ("no room 1", "no room 2")


def test_columns_are_views(server: FakeServer, client: Client) -> None:
    server.fire(values=[pb.Value(string=b"one"), pb.Value(signed=-1)])
    server.fire(values=[pb.Value(string=b""), pb.Value(unavailable="gone")])
    server.end(pb.End.REASON_UNSUBSCRIBED)
    with client.subscribe("*:*") as subscription:
        (batch,) = subscription.columns()
    assert batch.seq.tolist() == [1, 2]
    assert not batch.seq.flags.owndata
    assert batch.comm.tolist() == [b"postgres", b"postgres"]
    strings, numbers = batch.values
    assert isinstance(strings, StringColumn)
    assert [strings[row] for row in range(len(strings))] == [b"one", b""]
    assert strings.unavailable is None
    assert isinstance(numbers, NumberColumn)
    assert numbers.values[0] == -1
    assert numbers.unavailable is not None
    assert numbers.unavailable.tolist() == [False, True]
    assert batch.sites[1].probe.name == "query__start"
    assert batch.sites[1].captures[0].is_string


def test_columns_of_a_wrong_length_are_an_error(server: FakeServer, client: Client) -> None:
    server.tell(pb.StreamResponse(columns=pb.Columns(blocks=[pb.ColumnBlock(count=2, seq=bytes(8))])))
    with client.subscribe("*:*") as subscription, pytest.raises(ProtocolError, match="8 bytes as 2 numbers"):
        next(subscription.columns())


def test_losses_and_statuses_are_told(server: FakeServer, client: Client) -> None:
    server.fire()
    server.lose(5)
    refused = armed(2, pb.SiteStatus.STATE_REFUSED, "no room")
    server.tell(pb.StreamResponse(status=pb.Status(sites=[refused, armed(1, pb.SiteStatus.STATE_DISARMED)])))
    server.end(pb.End.REASON_SERVER_STOPPING)
    with client.subscribe("*:*") as subscription:
        messages = list(subscription.messages())
    assert [type(message) for message in messages] == [Descriptions, EventBatch, Loss, Status, End]
    assert subscription.lost[LossStage.QUEUE] == 5
    assert [site.reason for site in subscription.sites] == ["no room"]
    assert subscription.sites_armed == 1
    assert subscription.end is not None
    assert subscription.end.reason is EndReason.SERVER_STOPPING


def test_a_broken_stream_goes_on_without_gap_or_double(server: FakeServer, client: Client) -> None:
    server.fire(2)
    server.break_after = 2
    with client.subscribe("*:*") as subscription:
        seen = []
        for message in subscription.messages():
            if isinstance(message, EventBatch):
                seen += [event.seq for event in message.events]
            elif isinstance(message, Interruption):
                assert isinstance(message.error, ServerUnavailableError)
                server.fire(2)
                server.end(pb.End.REASON_UNSUBSCRIBED)
    assert seen == [1, 2, 3, 4]
    assert [request.from_seq for request in server.asked("StreamRequest")] == [1, 3]


def test_a_stream_broken_before_its_first_event_begins_anew(server: FakeServer, client: Client) -> None:
    server.fire(2)
    server.break_after = 1
    server.end(pb.End.REASON_UNSUBSCRIBED)
    with client.subscribe("*:*") as subscription:
        assert [event.seq for event in subscription.events()] == [1, 2]


def test_a_later_call_goes_on_after_the_last_event_taken(server: FakeServer, client: Client) -> None:
    server.fire(4)
    server.end(pb.End.REASON_UNSUBSCRIBED)
    with client.subscribe("*:*") as subscription:
        assert [event.seq for event in islice(subscription.events(), 2)] == [1, 2]
        assert [event.seq for event in subscription.events()] == [3, 4]
        assert [event.seq for event in subscription.events(from_seq=2)] == [2, 3, 4]


def test_a_break_longer_than_the_lease_is_an_error(server: FakeServer, client: Client) -> None:
    server.lease_seconds = 0
    server.break_after = 0
    with client.subscribe("*:*") as subscription, pytest.raises(ServerUnavailableError):
        next(subscription.events())


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.ABORTED, StreamTakenOverError),
        (grpc.StatusCode.UNIMPLEMENTED, UnsupportedError),
    ],
)
def test_other_errors_end_the_stream(
    server: FakeServer, client: Client, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    with client.subscribe("*:*") as subscription:
        server.refuse = (code, "so it is")
        with pytest.raises(kind, match="so it is"):
            next(subscription.events())
    assert len(server.asked("StreamRequest")) == 1


def test_unsubscribe_while_the_stream_is_open_gives_the_rest(server: FakeServer, client: Client) -> None:
    server.fire(1)
    subscription = client.subscribe("*:*")
    events = subscription.events()
    assert next(events).seq == 1
    server.fire(2)
    assert subscription.unsubscribe().fired == 3
    assert [event.seq for event in events] == [2, 3]
    subscription.unsubscribe()
    assert len(server.asked("UnsubscribeRequest")) == 1


def test_leaving_the_block_unsubscribes(server: FakeServer, client: Client) -> None:
    with client.subscribe("*:*"):
        assert [held.id for held in client.subscriptions()] == ["sub-1"]
    assert server.asked("UnsubscribeRequest")
    assert client.subscriptions() == ()


def test_unsubscribe_that_is_refused_by_rate_is_tried_again(server: FakeServer, client: Client) -> None:
    with client.subscribe("*:*"):
        server.refuse_unsubscribe = 3
    assert len(server.asked("UnsubscribeRequest")) == 4
    assert not server.subscribed


def test_who_cannot_unsubscribe_is_told_that_it_stays_armed(server: FakeServer) -> None:
    server.refuse_unsubscribe = 1000
    with (
        Client(server.target, timeout_seconds=1) as client,
        pytest.raises(StillSubscribedError, match=r"unsubscribe sub-1: .* stays armed until its lease expires, 30 s"),
        client.subscribe("*:*"),
    ):
        pass
    assert server.subscribed


def test_a_bad_field_is_named(server: FakeServer, client: Client) -> None:
    server.refuse = bad_request("selectors[0]", "a colon is missing (column 3)")
    with pytest.raises(InvalidRequestError, match=r"selectors\[0\]: a colon is missing") as caught:
        client.subscribe("abc")
    assert caught.value.violations == (Violation("selectors[0]", "a colon is missing (column 3)"),)


def test_unknown_enum_values_are_errors(server: FakeServer, client: Client) -> None:
    server.sites = [armed(state=99)]
    with pytest.raises(ProtocolError, match="site state 99"):
        client.subscribe("*:*")


def test_events_of_sites_never_described_are_errors(server: FakeServer, client: Client) -> None:
    server.tell(pb.StreamResponse(columns=columns([event(1, site_id=7)])))
    with client.subscribe("*:*") as subscription, pytest.raises(ProtocolError, match="site 7"):
        next(subscription.events())


def test_nobody_there() -> None:
    with (
        Client("unix:/nowhere/sock") as client,
        pytest.raises(ServerUnavailableError, match="cannot connect to") as caught,
    ):
        client.info()
    assert caught.value.target == "unix:/nowhere/sock"


def test_a_server_that_does_not_answer(server: FakeServer) -> None:
    told = f"get server info: {server.target} did not answer within 0.05 s: it may be busy; try again, or see its log"
    with (
        Client(server.target, timeout_seconds=0.05) as client,
        server.news,
        pytest.raises(ServerTimeoutError, match=re.escape(told)),
    ):
        client.info()
