"""Aggregations over the API: what may be asked for, and the snapshots that answer."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import grpc
import pytest

from stapsdtd.api import snapshot_reader
from stapsdtd.capture.engine import LossStage
from stapsdtd.client import (
    Account,
    Aggregate,
    Client,
    InvalidAggregateError,
    InvalidRequestError,
    Snapshot,
    SubscribeOptions,
)
from stapsdtd.events.batch import EventBatch
from stapsdtd.model import BuiltIn, Capture, Object
from stapsdtd.query.actions import Emit
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import Served, processes
from tests.support import wait_for
from tests.unit.samples import argument, batch, signed, site, strings, unsigned

COUNT = pb.AggregateFunction(function=pb.AggregateFunction.FUNCTION_COUNT)
SUM = pb.AggregateFunction(function=pb.AggregateFunction.FUNCTION_SUM)


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(1) as started:
        yield started


@pytest.fixture
def app(server: Served, pids: list[int]) -> Object:
    found = server.file_object(site("call", 1, [argument(signed=True), argument()], function="work"))
    server.map(pids[0], found)
    return found


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(f"unix:{server.socket}") as connected:
        yield connected


def hits(count: int) -> EventBatch:
    """Of site 1, without values."""
    return batch(range(count))


def call(*values: int, texts: Sequence[bytes | None] = ()) -> EventBatch:
    """Events of site 1 with a value, and with texts before it if there are any."""
    columns = [strings(*texts), signed(*values)] if texts else [signed(*values)]
    return batch(range(len(values)), *columns)


def keys_of(snapshot: Snapshot) -> dict[Any, Any]:
    return {row.key: dict(row.values) for row in snapshot.rows}


@pytest.mark.parametrize(
    ("aggregation", "field", "reason"),
    [
        (pb.Aggregation(), "aggregation.functions", "at least one is needed"),
        (pb.Aggregation(functions=[pb.AggregateFunction()]), "aggregation.functions", "there is no function 0"),
        (pb.Aggregation(functions=[COUNT, COUNT]), "aggregation.functions", "only one count is possible"),
        (pb.Aggregation(functions=[SUM]), "aggregation.value", "say of which value, such as arg0"),
        (pb.Aggregation(functions=[COUNT], value="arg0"), "aggregation.value", "count needs none"),
        (
            pb.Aggregation(functions=[SUM], value="arg0:str"),
            "aggregation.value",
            "arg0:str is a string, and",
        ),
        (
            pb.Aggregation(functions=[SUM], value="execname"),
            "aggregation.value",
            "execname is a string, and",
        ),
        (
            pb.Aggregation(functions=[SUM], value="arg0:word"),
            "aggregation.value",
            "'arg0:word' is not a capture",
        ),
        (
            pb.Aggregation(functions=[COUNT], by=["common"]),
            "aggregation.by",
            "unknown name 'common'; the names",
        ),
        (pb.Aggregation(functions=[COUNT], by=["arg0:int[3]"]), "aggregation.by", "only str and buf take a length"),
        (pb.Aggregation(functions=[COUNT], by=["pid"] * 9), "aggregation.by", "there are 9 keys; the limit is 8"),
        (pb.Aggregation(functions=[COUNT], max_keys=10_001), "aggregation.max_keys", "more than the 10000 allowed"),
        (pb.Aggregation(functions=[COUNT], interval_ms=9), "aggregation.interval_ms", "must be at least 10"),
    ],
)
@pytest.mark.usefixtures("app")
def test_what_cannot_be_computed_is_refused(
    server: Served, aggregation: pb.Aggregation, field: str, reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        server.subscribe("app:call", aggregation=aggregation)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = raised.value.details() or ""
    assert details.startswith(f"{field}: ")
    assert reason in details


@pytest.mark.parametrize(
    ("wanted", "field", "caret"),
    [
        (Aggregate(by=["pid", "arg0 +"]), "aggregation.by[1]", 6),
        (Aggregate(by=["arg0 / 0"]), "aggregation.by[0]", 7),
        (Aggregate(by=["  arg0:str[0]"]), "aggregation.by[0]", 0),
        (Aggregate(functions=["sum"], value="arg0 + x"), "aggregation.value", 7),
        (Aggregate(functions=["sum"], value="arg0 ? str(arg0) : 'x'"), "aggregation.value", 0),
        (Aggregate(by=['cgroup == "/no/such/cgroup"']), "aggregation.by[0]", 10),
    ],
)
@pytest.mark.usefixtures("app")
def test_wrong_expressions_are_told_with_the_place(client: Client, wanted: Aggregate, field: str, caret: int) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        client.aggregate("app:call", wanted)
    (violation,) = raised.value.violations
    assert (violation.field, violation.caret) == (field, caret)
    assert violation.excerpt


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        (["median"], "there is no function median"),
        (["lquantize(0, x, 1)"], "the parameters must be integers"),
    ],
)
def test_what_the_client_knows_better(client: Client, functions: list[str], reason: str) -> None:
    with pytest.raises(InvalidAggregateError, match=reason):
        client.aggregate("app:call", Aggregate(functions=functions, value="arg0"))


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        (["lquantize(0, 10)"], "lquantize has 3 parameters, not 2"),
        (["quantize", "percentiles"], "only one histogram is possible"),
        (["llquantize(1, 0, 1, 2)"], "llquantize: the factor must be at least 2"),
    ],
)
@pytest.mark.usefixtures("app")
def test_impossible_histograms_are_refused(client: Client, functions: list[str], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        client.aggregate("app:call", Aggregate(functions=functions, value="arg0"))


@pytest.mark.usefixtures("app")
def test_captures_and_fields_have_no_use(server: Served) -> None:
    for selector, more, reason in (
        ("app:call(arg0)", {}, "an aggregation has no use for a capture list"),
        ("app:call", {"fields": ["uid"]}, "an aggregation has no events that could have them; use by"),
    ):
        with pytest.raises(grpc.RpcError, match=reason):
            server.subscribe(selector, aggregation=pb.Aggregation(functions=[COUNT]), **more)


@pytest.mark.usefixtures("app")
def test_one_snapshot_at_the_end(server: Served, client: Client) -> None:
    everything = ["count", "sum", "min", "max", "avg", "stddev", "values", "quantize"]
    wanted = Aggregate(functions=everything, value="arg0", by=["arg1:str", "name", "function", "provider", "execname"])
    subscription = client.aggregate("app:call", wanted)
    server.fire(call(1, 2, -3, 4, texts=(b"x", b"y", b"x", None)))
    server.fire(call(6, texts=(b"y",)))
    server.sink.filtered(2)
    account = subscription.unsubscribe()
    (snapshot,) = subscription.snapshots()
    rest = ("call", "work", "app", "app")
    assert {key[0]: values for key, values in keys_of(snapshot).items()} == {
        "x": {"count": 2, "sum": -2, "min": -3, "max": 1, "avg": -1.0, "stddev": 2.0, "values": 2},
        "y": {"count": 2, "sum": 8, "min": 2, "max": 6, "avg": 4.0, "stddev": 2.0, "values": 2},
        None: {"count": 1, "sum": 4, "min": 4, "max": 4, "avg": 4.0, "stddev": 0.0, "values": 1},
    }
    assert {key[1:] for key in keys_of(snapshot)} == {rest}
    buckets = {row.key[0]: [(each.low, each.high, each.count) for each in row.buckets] for row in snapshot.rows}
    assert buckets == {"x": [(-3, -2, 1), (1, 1, 1)], "y": [(2, 3, 1), (4, 7, 1)], None: [(4, 7, 1)]}
    assert snapshot.account == account == Account(
        fired=7, delivered=0, filtered=2, lost_kernel_buffer=0, lost_queue=0, lost_decode=0, in_flight=0, sites=1,
        aggregated=5,
    )  # fmt: skip


@pytest.mark.usefixtures("app")
def test_keys_and_values_can_be_expressions(server: Served, client: Client) -> None:
    by = ["arg0 / 10", 'arg0 > 14 ? "big" : str(arg1)', "arg0 == 3 && pid > 0", "arg0 / 4.0"]
    subscription = client.aggregate("app:call", Aggregate(functions=["count", "sum"], value="arg0 * 2 - 1", by=by))
    ((armed,),) = [target.sites for target in server.engine.armed.values()]
    assert armed.action == Emit((Capture(0), Capture(1, is_string=True, max_bytes=255)))
    values, texts = signed(3, 3, 12, 16), strings(b"x", b"x", None, b"y")
    server.fire(batch(range(4), values, texts))
    subscription.unsubscribe()
    (snapshot,) = subscription.snapshots()
    assert keys_of(snapshot) == {
        (0, "x", 1, 0.75): {"count": 2, "sum": 10},
        (1, None, 0, 3.0): {"count": 1, "sum": 23},
        (1, "big", 0, 4.0): {"count": 1, "sum": 31},
    }


@pytest.mark.usefixtures("app")
def test_what_the_filter_needs_is_not_taken_for_a_key(server: Served, client: Client) -> None:
    options = SubscribeOptions(where="arg1 + arg0 == 7.0")
    subscription = client.aggregate("app:call", Aggregate(by=["arg0 + 1"]), options)
    server.fire(batch(range(3), signed(1, 2, 3), unsigned(6, 6, 4)))
    account = subscription.unsubscribe()
    (snapshot,) = subscription.snapshots()
    assert keys_of(snapshot) == {(2,): {"count": 1}, (4,): {"count": 1}}
    assert (account.aggregated, account.filtered) == (2, 1)


def test_what_the_server_adds_up_is_told(server: Served, client: Client, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("one", 1), site("two", 2), site("three", 3)))
    server.engine.refuse = {"three": "for a reason"}
    with client.aggregate("app:*", Aggregate()) as subscription:
        assert subscription.added_late == {"it sends events": 2}
        (held,) = client.subscriptions()
        assert held.added_late == {"it sends events": 2}
    with client.aggregate("app:*", Aggregate(), SubscribeOptions(where="pid * 2 == 8.0")) as subscription:
        assert subscription.added_late == {"its filter is evaluated after the hit": 2}
    with client.subscribe("app:*") as events:
        assert events.added_late == {}


@pytest.mark.usefixtures("app")
def test_intervals_add_up(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate(functions=["count"], interval_ms=10))
    snapshots = subscription.snapshots()
    seen = [next(snapshots)]
    for _ in range(5):
        server.fire(hits(2))
        seen.append(next(snapshots))
    subscription.unsubscribe()
    seen += snapshots
    assert [each.number for each in seen] == list(range(1, len(seen) + 1))
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(seen))
    counted = 0
    for snapshot in seen:
        counted += sum(int(row.values["count"] or 0) for row in snapshot.rows)
        account = snapshot.account
        assert account.aggregated == counted
        assert account.fired == account.aggregated + account.filtered + account.lost + account.in_flight
    assert counted == 10


@pytest.mark.usefixtures("app")
def test_interval_ends_when_its_hits_are_there(server: Served, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes on a busy host."""
    monkeypatch.setattr(snapshot_reader, "_COLLECT_SECONDS", 0.01)
    server.engine.collecting = collecting = Future[int]()
    collecting.set_running_or_notify_cancel()
    subscription = client.aggregate("app:call", Aggregate(functions=["count"], interval_ms=10))
    snapshots = subscription.snapshots()
    threading.Timer(0.3, partial(server.fire, hits(2))).start()
    threading.Timer(0.6, partial(collecting.set_result, time.monotonic_ns() + 500_000_000)).start()
    first = next(snapshots)
    assert (first.number, first.account.aggregated) == (1, 2)
    assert first.duration_ns > 400_000_000
    subscription.unsubscribe()


@pytest.mark.usefixtures("app")
def test_cumulative_snapshots_cover_everything(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate(functions=["count"], interval_ms=10, cumulative=True))
    snapshots = subscription.snapshots()
    server.fire(hits(1))
    wait_for(lambda: keys_of(next(snapshots)) == {(): {"count": 1}}, "the first event")
    server.fire(hits(1))
    wait_for(lambda: keys_of(next(snapshots)) == {(): {"count": 2}}, "both events")


@pytest.mark.usefixtures("app")
def test_a_stream_that_broke_gets_the_last_snapshot_again(server: Served) -> None:
    wanted = pb.Aggregation(functions=[COUNT], interval_ms=10)
    ident = server.subscribe("app:call", aggregation=wanted).subscription_id
    server.fire(hits(3))
    first = next(message.snapshot for message in server.stream(ident) if message.HasField("snapshot"))
    again = next(message.snapshot for message in server.stream(ident, from_seq=1) if message.HasField("snapshot"))
    assert (again.number, again.values) == (first.number, first.values)
    following = next(message.snapshot for message in server.stream(ident, from_seq=2) if message.HasField("snapshot"))
    assert (following.number, following.begin_ns, following.count) == (2, first.end_ns, 0)


@pytest.mark.usefixtures("app")
def test_a_client_that_comes_after_the_end_gets_the_rest_once(server: Served) -> None:
    ident = server.subscribe("app:call", aggregation=pb.Aggregation(functions=[COUNT])).subscription_id
    server.fire(hits(3))
    server.unsubscribe(ident)
    for _ in range(2):
        snapshot, end = server.stream(ident, from_seq=1)
        assert struct.unpack("<q", snapshot.snapshot.values[0].data) == (3,)
        assert end.end.account.aggregated == 3
    (end,) = server.stream(ident, from_seq=2)
    assert end.end.account.aggregated == 3


@pytest.mark.usefixtures("app")
def test_large_snapshots_take_several_messages(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate(by=["arg1:str[1024]"]))
    texts = [b"%04d" % number * 256 for number in range(3000)]
    server.fire(batch(range(3000), strings(*texts)))
    subscription.unsubscribe()
    sizes = [message.ByteSize() for message in server.stream(subscription.id) if message.HasField("snapshot")]
    assert len(sizes) > 1
    assert max(sizes) < 2 << 20
    (snapshot,) = subscription.snapshots()
    assert {row.key[0] for row in snapshot.rows} == {text.decode() for text in texts}
    assert snapshot.account.aggregated == 3000


@pytest.mark.usefixtures("app")
def test_integers_stay_exact_beside_larger_ones(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate(functions=["sum"], value="arg1", by=["arg0"]))
    exact, greatest = (1 << 53) + 1, (1 << 64) - 1
    server.fire(batch(range(4), signed(1, 2, 2, -1), unsigned(exact, greatest, greatest, 5)))
    # what another site declares as unsigned
    server.fire(batch(range(1), unsigned(greatest), unsigned(greatest)))
    subscription.unsubscribe()
    (snapshot,) = subscription.snapshots()
    assert keys_of(snapshot) == {
        (1,): {"sum": exact}, (2,): {"sum": float(2 * greatest)}, (-1,): {"sum": 5}, (greatest,): {"sum": greatest}
    }  # fmt: skip


@pytest.mark.usefixtures("app")
def test_keys_without_room_are_lost_and_told(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate(by=["arg0"], max_keys=2))
    server.fire(call(1, 1, 2, 3, 4))
    account = subscription.unsubscribe()
    (snapshot,) = subscription.snapshots()
    assert len(snapshot.rows) == 2
    assert (account.aggregated, account.lost_table_full, account.fired) == (
        sum(int(row.values["count"] or 0) for row in snapshot.rows), 5 - account.aggregated, 5,
    )  # fmt: skip
    assert account.lost_table_full > 0
    assert subscription.lost[next(stage for stage in subscription.lost if stage.value == "table_full")] > 0


@pytest.mark.usefixtures("app")
def test_losses_before_are_told_as_of_events(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate())
    server.lose(LossStage.KERNEL_BUFFER, 4)
    account = subscription.unsubscribe()
    assert (account.fired, account.lost_kernel_buffer, account.aggregated) == (4, 4, 0)


@pytest.mark.usefixtures("app")
def test_sites_without_the_argument_are_refused(client: Client) -> None:
    with client.aggregate("app:call", Aggregate(by=["arg2"])) as subscription:
        (refused,) = subscription.sites
    assert refused.reason == "it has 2 arguments, so there is no arg2"


@pytest.mark.usefixtures("app")
def test_sites_at_which_an_expression_cannot_be_computed_are_refused(server: Served, client: Client) -> None:
    server.engine.uncaptured = {BuiltIn.UID: "it knows no users"}
    for by, reason in (
        ("arg2 + 1", "it has 2 arguments, so there is no arg2"),
        ("uid / 1000", "cannot compute uid / 1000: it knows no users"),
    ):
        with client.aggregate("app:call", Aggregate(by=[by])) as subscription:
            (refused,) = subscription.sites
        assert refused.reason == reason
    with client.aggregate("app:call", Aggregate(by=["uid"])) as subscription:
        assert [each.reason for each in subscription.sites] == [""]


@pytest.mark.usefixtures("app")
def test_percentiles_come_from_the_buckets(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:call", Aggregate(functions=["percentiles"], value="arg0"))
    server.fire(call(*range(1, 10_001)))
    subscription.unsubscribe()
    (snapshot,) = subscription.snapshots()
    (row,) = snapshot.rows
    for percent in (1, 50, 90, 99, 100):
        exact = percent * 100
        assert exact <= (row.percentile(percent) or 0) <= exact * (1 + 1 / 32)
