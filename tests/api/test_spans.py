"""Spans over the API: what may be asked for, and pairs as events and in snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from stapsdtd.client import Aggregate, Client, Span, SpanAccount, SubscribeOptions
from stapsdtd.model import Object
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import Served, processes
from tests.unit.samples import argument, batch, signed, site, strings

WHERE = "elapsed > 5 && arg0 == 1"
COUNT = pb.AggregateFunction(function=pb.AggregateFunction.FUNCTION_COUNT)


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(1) as started:
        yield started


@pytest.fixture
def app(server: Served, pids: list[int]) -> Object:
    found = server.file_object(
        site("begin", 1, [argument(signed=True), argument()]), site("end", 2, [argument(signed=True), argument()])
    )
    server.map(pids[0], found)
    return found


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(f"unix:{server.socket}") as connected:
        yield connected


def wrong(field: str, reason: str, **request: Any) -> Any:
    return pytest.param(request, field, reason, id=reason)


@pytest.mark.parametrize(
    ("request_fields", "field", "reason"),
    [
        wrong("span.start_selectors", "at least one is needed", span=pb.Span()),
        wrong("span.start_selectors", "closing parenthesis", span=pb.Span(start_selectors=["app:begin(arg0"])),
        wrong("span.start_selectors", "the same", span=pb.Span(start_selectors=["app:begin(arg0)", "app:other"])),
        wrong(
            "span.start_selectors",
            "no use for a capture list",
            span=pb.Span(start_selectors=["app:begin(arg0)"]),
            aggregation=pb.Aggregation(functions=[COUNT]),
        ),
        wrong(
            "span.start_where",
            "elapsed is not known yet",
            span=pb.Span(start_selectors=["app:begin"], start_where="elapsed > 5"),
        ),
        wrong("span.start_where", "unexpected end", span=pb.Span(start_selectors=["app:begin"], start_where="arg0 >")),
        wrong("span.latest", "with nested", span=pb.Span(start_selectors=["app:begin"], nested=True, latest=True)),
        wrong("span.key", "'name'", span=pb.Span(start_selectors=["app:begin"], key=["'name'"])),
        wrong("span.key", "not the same at both ends", span=pb.Span(start_selectors=["app:begin"], key=["name"])),
        wrong("span.key", "not the same at both ends", span=pb.Span(start_selectors=["app:begin"], key=["start.arg0"])),
        wrong("span.key", "the limit is 8", span=pb.Span(start_selectors=["app:begin"], key=["arg0"] * 9)),
        wrong("span.max_open", "10000 allowed", span=pb.Span(start_selectors=["app:begin"], max_open=10_001)),
        wrong("where", "elapsed is the time of a span", where=WHERE),
        wrong(
            "aggregation.by",
            "start.arg0 is known of spans alone",
            aggregation=pb.Aggregation(functions=[COUNT], by=["start.arg0"]),
        ),
        wrong("fields", "elapsed is known of spans alone", fields=["elapsed"]),
    ],
)
def test_what_cannot_be_paired_is_refused(
    server: Served, request_fields: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        server.subscribe("app:end", **request_fields)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = raised.value.details() or ""
    assert details.startswith(f"{field}: ")
    assert reason in details


@pytest.mark.usefixtures("app")
def test_pairs_are_events(server: Served, client: Client) -> None:
    span = Span(start_selectors=["app:begin(arg1:str)"])
    options = SubscribeOptions(where=WHERE)
    with client.subscribe("app:end(arg0)", options, span) as subscription:
        ids = {each.name: each.site_id for each in subscription.sites}
        server.sink.deliver(batch([10, 20], strings(b"one", None), tid=[11, 12], site_id=ids["begin"]))
        server.sink.deliver(batch([15, 40, 50], signed(1, 1, 1), tid=[11, 12, 12], site_id=ids["end"]))
        subscription.unsubscribe()
        (event,) = subscription.events()
        account = subscription.account
    assert event.values == (1, None, 20)
    assert [(each.of_start, each.field) for each in subscription.described[ids["end"]].captures] == [
        (False, ""), (True, ""), (False, "elapsed"),
    ]  # fmt: skip
    assert account is not None
    assert account.spans == SpanAccount(starts=2, paired=2, unmatched=1)
    assert (account.fired, account.delivered, account.filtered) == (5, 1, 1)


@pytest.mark.usefixtures("app")
def test_pairs_in_snapshots(server: Served, client: Client) -> None:
    wanted = Aggregate(functions=["count", "sum"], value="elapsed", by=["start.arg1:str", "arg0"])
    with client.aggregate("app:end", wanted, span=Span(start_selectors=["app:begin"])) as subscription:
        ids = {each.name: each.site_id for each in subscription.sites}
        server.sink.deliver(batch([10, 20], strings(b"one", b"two"), tid=[11, 12], site_id=ids["begin"]))
        server.sink.deliver(batch([15, 40], signed(1, 2), tid=[11, 12], site_id=ids["end"]))
        subscription.unsubscribe()
        (snapshot,) = subscription.snapshots()
    assert {row.key: tuple(row.values.values()) for row in snapshot.rows} == {("one", 1): (1, 5), ("two", 2): (1, 20)}
    assert snapshot.account.spans == SpanAccount(starts=2, paired=2)
    assert snapshot.account.aggregated == 2


@pytest.mark.usefixtures("app")
def test_keys_that_a_site_lacks_refuse_it(client: Client) -> None:
    span = Span(start_selectors=["app:begin"], key=["arg7"])
    with client.subscribe("app:end", span=span) as subscription:
        reasons = {each.name: each.reason for each in subscription.sites}
    assert reasons == dict.fromkeys(["begin", "end"], "it has 2 arguments, so there is no arg7")
