"""Fields of events: what is computed of the values that were captured, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from stapsdtd.client import Client, ColumnBatch, EventBatch, StringColumn, SubscribeOptions, Subscription
from stapsdtd.model import BuiltIn, Capture, Object
from stapsdtd.query.actions import Emit
from tests.api.served import Served, processes
from tests.unit.samples import argument, batch, signed, site, strings, unsigned

NOT_READ = "something that it is computed from could not be read, or it is divided by 0"


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(1) as started:
        yield started


@pytest.fixture
def app(server: Served, pids: list[int]) -> Object:
    found = server.file_object(
        site("call", 1, [argument(signed=True), argument(signed=True), argument()]), site("short", 2, [argument()])
    )
    server.map(pids[0], found)
    return found


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(f"unix:{server.socket}") as connected:
        yield connected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (["arg0 +"], "unexpected end"),
        (["execname + 1"], "execname is a string"),
        (["gids"], "gids"),
        (["elapsed / 1000"], "elapsed / 1000 is known of spans alone, and the request has none"),
        ([f"arg0 + {number}" for number in range(33)], "there are 33; the limit is 32"),
    ],
)
def test_what_is_wrong_is_named(server: Served, fields: list[str], reason: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        server.subscribe("app:call", fields=fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = caught.value.details() or ""
    assert details.startswith("fields: ")
    assert reason in details


def captured(server: Served, name: str) -> tuple[Capture, ...]:
    """What the engine is asked to capture at a site."""
    targets = [each for target in server.engine.armed.values() for each in target.sites]
    (action,) = (each.action for each in targets if each.site.name == name)
    assert isinstance(action, Emit)
    return action.captures


def subscribed(client: Client, selector: str, *fields: str, where: str = "") -> Subscription:
    return client.subscribe(selector, SubscribeOptions(fields=fields, where=where))


def site_id(subscription: Subscription, name: str) -> int:
    return next(each.site_id for each in subscription.sites if each.name == name)


def read(subscription: Subscription) -> list[tuple[Any, ...]]:
    subscription.unsubscribe()
    messages = list(subscription.messages())
    return [event.values for each in messages if isinstance(each, EventBatch) for event in each.events]


@pytest.mark.usefixtures("app")
class TestValues:
    def test_come_in_the_order_asked_for(self, server: Served, client: Client) -> None:
        asked = ("arg1 - arg0", "uid", "str(arg2) ~ 'S*'", "arg1 - arg0 > 3 ? 'slow' : 'fast'", "name", "uid")
        with subscribed(client, "app:call(arg1)", *asked) as subscription:
            assert captured(server, "call") == (
                Capture(1), Capture(1), Capture(0), Capture(BuiltIn.UID), Capture(2, is_string=True),
            )  # fmt: skip
            made = batch(
                [1, 2],
                signed(5, 10),
                signed(5, 10),
                signed(2, 3),
                unsigned(1000, 0),
                strings(b"SELECT", None),
                site_id=site_id(subscription, "call"),
            )
            next(iter(server.engine.sinks.values())).deliver(made)
            events = read(subscription)
        assert events == [(5, 3, 1000, 1, "fast", "call"), (10, 7, 0, None, "slow", "call")]
        (described,) = subscription.described.values()
        assert described.fields == asked[:-1]
        assert [capture.index for capture in described.captures if not capture.field] == [1]

    def test_of_columns(self, server: Served, client: Client) -> None:
        with subscribed(client, "app:call()", "arg0 * 2", "provider") as subscription:
            made = batch([1, 2], signed(5, -1), site_id=site_id(subscription, "call"))
            next(iter(server.engine.sinks.values())).deliver(made)
            subscription.unsubscribe()
            (found,) = subscription.columns()
        assert isinstance(found, ColumnBatch)
        number, text = found.values
        assert not isinstance(number, StringColumn)
        assert number.values.tolist() == [10, -2]
        assert isinstance(text, StringColumn)
        assert list(text) == [b"app", b"app"]

    def test_are_computed_of_what_a_filter_leaves(self, server: Served, client: Client) -> None:
        with subscribed(client, "app:call(arg0)", "arg0 / arg1", where="arg0 * 1.0 != arg1") as subscription:
            made = batch(
                [1, 2, 3], signed(9, 4, 6), signed(9, 4, 6), signed(9, 2, 0), site_id=site_id(subscription, "call")
            )
            next(iter(server.engine.sinks.values())).deliver(made)
            subscription.unsubscribe()
            events = list(subscription.events())
        assert [event.values for event in events] == [(4, 2), (6, None)]
        assert events[1].unavailable == {1: NOT_READ}

    def test_that_a_site_cannot_have_are_missing_there(self, server: Served, client: Client) -> None:
        with subscribed(client, "app:*()", "arg1 + 1") as subscription:
            assert captured(server, "short") == ()
            sink = next(iter(server.engine.sinks.values()))
            sink.deliver(batch([1], site_id=site_id(subscription, "short")))
            sink.deliver(batch([2], signed(4), site_id=site_id(subscription, "call")))
            subscription.unsubscribe()
            short, call = subscription.events()
        assert (short.values, call.values) == ((None,), (5,))
        assert short.unavailable == {0: "it has 1 argument, so there is no arg1"}
