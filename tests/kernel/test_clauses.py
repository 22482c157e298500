"""Several questions in one subscription, on the real kernel: each has its own answer and its own account."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import (
    Account,
    Aggregate,
    Clause,
    Client,
    Event,
    EventBatch,
    Snapshot,
    Span,
    SubscribeOptions,
    Subscription,
)
from tests.support import TICKER, Daemon, Ticker, compile_target

pytestmark = pytest.mark.kernel

ASKING = TICKER.replace("ticker", "asking")


@pytest.fixture(scope="session")
def asking_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "asking"
    return compile_target("spanner.c", output, f"-DPROVIDER={ASKING}", "-lpthread")


@pytest.fixture
def program(asking_program: Path) -> Iterator[Ticker]:
    with Ticker(asking_program) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as connected:
        yield connected


def probe(name: str, captures: str = "") -> str:
    return f"{ASKING}:{name}{captures}"


CLAUSES = (
    Clause(
        tag="every hundredth",
        selectors=[probe("end", "(arg1)")],
        where="arg1 % 100 == 0",
        fields=["uid"],
        span=Span(start_selectors=[probe("begin", "(arg2:str)")], start_where="arg1 % 100 == 0"),
    ),
    Clause(
        tag="begun",
        selectors=[probe("begin")],
        aggregate=Aggregate(functions=["count", "sum", "quantize"], value="arg1", by=["arg0"]),
    ),
    Clause(tag="first", selectors=[probe("begin", "(arg1)")], where="arg1 < 5"),
    Clause(tag="ended", selectors=[probe("end")], aggregate=Aggregate(), where="arg1 >= 490"),
)


def read(subscription: Subscription) -> tuple[dict[str, list[Event]], dict[str, Snapshot]]:
    """Return the events and the last snapshots of an ended subscription, by tag."""
    events: dict[str, list[Event]] = {}
    snapshots: dict[str, Snapshot] = {}
    for message in subscription.messages():
        if isinstance(message, EventBatch):
            for event in message.events:
                events.setdefault(event.tag, []).append(event)
        elif isinstance(message, Snapshot):
            snapshots[message.tag] = message
    return events, snapshots


def check(account: Account) -> None:
    spans = account.spans
    assert account.fired == account.delivered + account.aggregated + account.filtered + account.lost + (
        spans.starts + spans.unmatched
    )
    assert account.in_flight == account.lost == 0


@pytest.mark.vm
def test_each_clause_has_its_own_answer_and_account(client: Client, program: Ticker, engine: str) -> None:
    with client.query(CLAUSES) as subscription:
        assert sorted((site.tag, site.name) for site in subscription.sites) == [
            ("begun", "begin"), ("ended", "end"), ("every hundredth", "begin"), ("every hundredth", "end"),
            ("first", "begin"),
        ]  # fmt: skip
        assert len({site.site_id for site in subscription.sites}) == 5
        program.do("pairs 500")
        subscription.unsubscribe()
        events, snapshots = read(subscription)
    hundredth = events["every hundredth"]
    assert [event.values[:2] for event in hundredth] == [
        (number, f"work {number % 7}") for number in range(0, 500, 100)
    ]
    assert {event.values[3] for event in hundredth} == {0 if engine == "bpf" else None}
    assert [event.values for event in events["first"]] == [(number,) for number in range(5)]
    assert [event.seq for event in events["first"]] == [1, 2, 3, 4, 5]
    (row,) = snapshots["begun"].rows
    assert (row.values["count"], row.values["sum"]) == (500, sum(range(500)))
    assert sum(bucket.count for bucket in row.buckets) == 500
    assert [row.values for row in snapshots["ended"].rows] == [{"count": 10}]
    accounts = subscription.clause_accounts
    for account in accounts.values():
        check(account)
    assert {tag: (account.fired, account.delivered, account.aggregated) for tag, account in accounts.items()} == {
        "every hundredth": (1000, 5, 0), "begun": (500, 0, 500), "first": (500, 5, 0), "ended": (500, 0, 10),
    }  # fmt: skip
    whole = subscription.account
    assert whole is not None
    check(whole)
    assert (whole.fired, whole.delivered, whole.aggregated, whole.sites) == (2500, 10, 510, 5)


def test_scope_is_of_all_clauses(client: Client, program: Ticker, asking_program: Path) -> None:
    with Ticker(asking_program) as other, client.query(CLAUSES, SubscribeOptions(pids=[program.pid])) as subscription:
        other.do("pairs 500")
        program.do("pairs 10")
        subscription.unsubscribe()
        events, snapshots = read(subscription)
    assert {tag: {event.pid for event in of_clause} for tag, of_clause in events.items()} == {
        "every hundredth": {program.pid}, "first": {program.pid},
    }  # fmt: skip
    assert [row.values["count"] for row in snapshots["begun"].rows] == [10]
    for account in subscription.clause_accounts.values():
        check(account)
