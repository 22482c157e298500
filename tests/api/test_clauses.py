"""Clauses over the API: what may be asked for, and what a stream tells of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from stapsdtd.capture import engine
from stapsdtd.client import (
    Aggregate,
    Clause,
    Client,
    EventBatch,
    InvalidRequestError,
    Loss,
    LossStage,
    RequestFailedError,
    Snapshot,
    Subscription,
)
from stapsdtd.model import Object
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import Served, processes
from tests.support import wait_for
from tests.unit.samples import argument, batch, signed, site

ONE = pb.Clause(tag="one", selectors=["app:call"])


def chained(function: str, *selectors: str) -> pb.Clause:
    return pb.Clause(selectors=selectors or ["a:b"], chain=[function])


TWO = (
    Clause(tag="calls", selectors=["app:call(arg0)"]),
    Clause(tag="both", selectors=["app:*"], aggregate=Aggregate()),
)


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(1) as started:
        yield started


@pytest.fixture
def app(server: Served, pids: list[int]) -> Object:
    found = server.file_object(site("call", 1, [argument(signed=True)]), site("other", 2))
    server.map(pids[0], found)
    return found


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(f"unix:{server.socket}") as connected:
        yield connected


@pytest.mark.parametrize(
    ("wanted", "field", "reason"),
    [
        ({"clauses": [ONE], "selectors": ["app:*"]}, "selectors", "it is said in each of them"),
        ({"clauses": [ONE], "where": "arg0 == 1"}, "where", "it is said in each of them"),
        ({"clauses": [ONE, ONE]}, "clauses[1].tag", "another clause is 'one', too"),
        ({"clauses": [pb.Clause(tag="x" * 257, selectors=["a:b"])]}, "clauses[0].tag", "limited to 256 bytes"),
        ({"clauses": [pb.Clause(tag="one")]}, "clauses[0].selectors", "at least one is needed"),
        ({"clauses": [ONE, pb.Clause(selectors=["a:b("])]}, "clauses[1].selectors", "closing parenthesis"),
        ({"clauses": [pb.Clause(selectors=["a:b"], where="arg0 >")]}, "clauses[0].where", "unexpected end"),
        (
            {"clauses": [pb.Clause(selectors=["a:b"], aggregation=pb.Aggregation())]},
            "clauses[0].aggregation.functions",
            "at least one is needed",
        ),
        (
            {"clauses": [pb.Clause(selectors=["a:b"], span=pb.Span())]},
            "clauses[0].span.start_selectors",
            "at least one is needed",
        ),
        (
            {"clauses": [pb.Clause(tag=str(number), selectors=["a:b"]) for number in range(33)]},
            "clauses",
            "limit is 32",
        ),
        ({"clauses": [chained("f")]}, "clauses[0].chain", "the request names none in `functions`"),
        ({"clauses": [chained("f" * 257)], "functions": ["f"]}, "clauses[0].chain", "limited to 256 characters"),
        ({"clauses": [chained("f*", "fbt:::")], "functions": ["f"]}, "clauses[0].chain", "'f*' is no function"),
        (
            {"clauses": [pb.Clause(selectors=["fbt:::"], chain=map(str, range(17)))], "functions": ["f"]},
            "clauses[0].chain",
            "the limit is 16",
        ),
        (
            {"clauses": [pb.Clause(selectors=["fbt:::"], chain=["f"], span=pb.Span(start_selectors=["a:b"]))]},
            "clauses[0].chain",
            "cannot be combined with a span",
        ),
    ],
)
def test_what_is_wrong_is_named(server: Served, wanted: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Subscribe(pb.SubscribeRequest(**wanted))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert details.startswith(f"{field}: ")
    assert reason in details


def test_an_error_in_a_clause_is_shown_where_it_is(client: Client) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.query([Clause(selectors=["app:call"], where="arg0 === 1")])
    (violation,) = caught.value.violations
    assert violation.field == "clauses[0].where"
    assert "column 8" in violation.description


def keys(subscription: Subscription, server: Served) -> list[int]:
    """The engine's key of each clause."""
    return [clause.key for clause in server.subscriptions.get(subscription.id).clauses]


def ids(subscription: Subscription) -> dict[tuple[str, str], int]:
    return {(each.tag, each.name): each.site_id for each in subscription.sites}


@pytest.mark.usefixtures("app")
class TestStreams:
    def test_each_message_names_its_clause(self, server: Served, client: Client) -> None:
        with client.query(TWO) as subscription:
            calls, both = (server.engine.sinks[key] for key in keys(subscription, server))
            site_ids = ids(subscription)
            assert site_ids.keys() == {("calls", "call"), ("both", "call"), ("both", "other")}
            calls.deliver(batch([1, 2], signed(7, 8), site_id=site_ids["calls", "call"]))
            both.deliver(batch([1, 2, 3], site_id=site_ids["both", "call"]))
            both.lost(engine.LossStage.KERNEL_BUFFER, 2)
            subscription.unsubscribe()
            messages = list(subscription.messages())
        assert [(event.tag, event.seq, event.values) for each in messages if isinstance(each, EventBatch)
                for event in each.events] == [("calls", 1, (7,)), ("calls", 2, (8,))]  # fmt: skip
        assert [(each.tag, each.total) for each in messages if isinstance(each, Loss)] == [("both", 2)]
        ((snapshot),) = [each for each in messages if isinstance(each, Snapshot)]
        assert (snapshot.tag, [row.values for row in snapshot.rows]) == ("both", [{"count": 3}])
        assert subscription.end is not None
        assert {tag: account.fired for tag, account in subscription.end.clauses.items()} == {"calls": 2, "both": 5}
        assert subscription.end.account.fired == 7
        assert subscription.lost[LossStage.KERNEL_BUFFER] == 2

    def test_a_stream_resumes_in_each_clause(self, server: Served, client: Client) -> None:
        clauses = [Clause(tag=tag, selectors=["app:call(arg0)"]) for tag in ("a", "b")]
        with client.query(clauses) as subscription:
            for key, tag in zip(keys(subscription, server), ("a", "b"), strict=True):
                server.engine.sinks[key].deliver(
                    batch([1, 2, 3], signed(1, 2, 3), site_id=ids(subscription)[tag, "call"])
                )
            subscription.unsubscribe()
            first = [(event.tag, event.seq) for event in subscription.events()]
            assert sorted(first) == [(tag, seq) for tag in "ab" for seq in (1, 2, 3)]
            assert subscription.positions == {"a": 4, "b": 4}
            again = [(event.tag, event.seq) for event in subscription.events(from_seq={"a": 3, "b": 2})]
            assert sorted(again) == [("a", 3), ("b", 2), ("b", 3)]

    @pytest.mark.parametrize(
        ("wanted", "reason"),
        [
            ({"from_seq": 1}, "from_seq: the subscription has several clauses; name them in positions"),
            ({"positions": {"calls": 0}}, "positions: events and snapshots are numbered from 1"),
            ({"positions": {"call": 1}}, "positions: the subscription has no clause 'call'"),
        ],
    )
    def test_wrong_positions(self, server: Served, client: Client, wanted: dict[str, Any], reason: str) -> None:
        with client.query(TWO) as subscription:
            call = server.stub.Stream(
                pb.StreamRequest(subscription_id=subscription.id, encoding=pb.StreamRequest.ENCODING_ROWS, **wanted)
            )
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.details() == reason

    def test_a_busy_clause_does_not_hold_up_another(self, server: Served, client: Client) -> None:
        clauses = [Clause(tag=tag, selectors=["app:call(arg0)"]) for tag in ("busy", "quiet")]
        with client.query(clauses) as subscription:
            busy, quiet = (server.engine.sinks[key] for key in keys(subscription, server))
            site_ids = ids(subscription)
            for time in range(100):
                busy.deliver(batch([time], signed(time), site_id=site_ids["busy", "call"]))
            quiet.deliver(batch([1], signed(1), site_id=site_ids["quiet", "call"]))
            subscription.unsubscribe()
            tags = [event.tag for event in subscription.events()]
        assert tags.count("busy") == 100
        assert tags.index("quiet") <= 2


@pytest.mark.usefixtures("app")
def test_subscriptions_show_their_clauses(client: Client) -> None:
    with client.query([*TWO, Clause(selectors=["other"], where="pid == 1")]) as subscription:
        (shown,) = (each for each in client.subscriptions() if each.id == subscription.id)
    assert shown.selectors == ("app:call(arg0)", "app:*", "other")
    assert shown.where == ""
    assert [(each.tag, each.selectors, each.where) for each in shown.clauses] == [
        ("calls", ("app:call(arg0)",), ""), ("both", ("app:*",), ""), ("", ("other",), "pid == 1"),
    ]  # fmt: skip


@pytest.mark.usefixtures("app")
def test_a_site_is_refused_in_one_clause_alone(client: Client) -> None:
    clauses = [Clause(tag="good", selectors=["app:call"]), Clause(tag="bad", selectors=["app:call(arg7)"])]
    with client.query(clauses) as subscription:
        assert {(each.tag, each.state.value) for each in subscription.sites} == {("good", "armed"), ("bad", "refused")}


@pytest.mark.usefixtures("app")
def test_a_clause_that_cannot_be_armed_does_not_stop_another(server: Served, client: Client, tmp_path: Path) -> None:
    server.engine.failures["arm 1"] = OSError(28, "no room")
    with client.query([Clause(tag=tag, selectors=["app:call"]) for tag in ("first", "second")]) as subscription:
        states = {each.tag: (each.state.value, each.reason) for each in subscription.sites}
        assert keys(subscription, server) == [1, 2]
    assert states == {"first": ("refused", f"arm {tmp_path / 'app'}: no room"), "second": ("armed", "")}


def test_clauses_that_cannot_all_be_opened_leave_nothing_open(
    server: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = server.engine.open

    def fail_second(*arguments: Any, **named: Any) -> None:
        if server.engine.sinks:
            raise OSError(12, "no memory")
        opened(*arguments, **named)

    monkeypatch.setattr(server.engine, "open", fail_second)
    with pytest.raises(RequestFailedError, match="no memory"):
        client.query(TWO)
    # the arming thread closes it
    wait_for(lambda: not server.engine.sinks, "the first one to be closed")
