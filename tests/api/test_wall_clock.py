"""The server's clock is set while a subscription is read: what happened before keeps its times, and it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

import pytest

from stapsdtd.client import (
    Aggregate,
    Client,
    ClockChange,
    ColumnBatch,
    Encoding,
    EventBatch,
    Message,
    Snapshot,
    Span,
    Status,
)
from tests.api.served import Served, processes
from tests.unit.samples import batch, site
from tests.unit.settable_clock import OFFSET_NS, SECOND_NS

HOUR_NS = 3600 * SECOND_NS


@pytest.fixture(scope="module")
def pid() -> Iterator[int]:
    with processes(1) as (started,):
        yield started


@pytest.fixture
def client(server: Served, pid: int) -> Iterator[Client]:
    server.map(pid, server.file_object(site("begin", 1), site("end", 2)))
    with Client(f"unix:{server.socket}") as connected:
        yield connected


def times_of(messages: Iterable[Message]) -> list[tuple[int, int | None]]:
    """Return both times of each event."""
    found: list[tuple[int, int | None]] = []
    for message in messages:
        match message:
            case EventBatch(events=events):
                found += [(event.time_ns, event.monotonic_ns) for event in events]
            case ColumnBatch(monotonic_ns=monotonic_ns):
                assert monotonic_ns is not None
                found += zip(message.time_ns.tolist(), monotonic_ns.tolist(), strict=True)
            case _:
                pass
    return found


def changes_of(messages: Iterable[Message]) -> list[ClockChange]:
    return [message for message in messages if isinstance(message, ClockChange)]


@pytest.mark.parametrize("encoding", [Encoding.ROWS, Encoding.COLUMNS])
def test_events_have_the_times_that_the_clock_showed_whenever_they_are_read(
    server: Served, client: Client, encoding: Encoding
) -> None:
    subscription = client.subscribe("app:begin")
    before = [time.monotonic_ns() for _ in range(3)]
    server.fire(batch(before[:2], site_id=1))
    server.wall_clock.set_by(HOUR_NS)
    after = [time.monotonic_ns() for _ in range(2)]
    # one message of the engine has events from before and after
    server.fire(batch([before[2], *after], site_id=1))
    server.wall_clock.set_by(-2 * HOUR_NS)
    last = time.monotonic_ns()
    server.fire(batch([last], site_id=1))
    subscription.unsubscribe()
    wanted = [
        *((at + OFFSET_NS, at) for at in before),
        *((at + OFFSET_NS + HOUR_NS, at) for at in after),
        (last + OFFSET_NS - HOUR_NS, last),
    ]
    first = list(subscription.messages(encoding))
    assert times_of(first) == wanted
    assert [change.by_ns for change in changes_of(first)] == [HOUR_NS, -2 * HOUR_NS]
    server.wall_clock.set_by(5 * HOUR_NS)
    again = list(subscription.messages(encoding, from_seq=1))
    assert times_of(again) == wanted
    assert [change.by_ns for change in changes_of(again)] == [5 * HOUR_NS]
    assert times_of(subscription.messages(encoding, from_seq=5)) == wanted[4:]


@pytest.mark.usefixtures("client")
def test_an_idle_stream_tells_at_once_that_the_clock_was_set(server: Served) -> None:
    server.wall_clock.set_by(HOUR_NS)
    ident = server.subscribe().subscription_id
    call = server.stream(ident)
    server.wait_until_streaming()
    server.wall_clock.set_by(-HOUR_NS, suspended_ns=SECOND_NS)
    message = next(call)
    (change,) = message.status.clock_changes
    assert (list(message.status.sites), change.by_ns, change.suspended_ns) == ([], -HOUR_NS, SECOND_NS)
    assert change.time_ns == change.monotonic_ns + OFFSET_NS + SECOND_NS
    fired = time.monotonic_ns()
    server.fire(batch([fired], site_id=1))
    next(call)
    rows = next(call).rows
    assert rows.events[0].time_ns == fired + rows.realtime_offset_ns == fired + OFFSET_NS + SECOND_NS
    call.cancel()


def test_a_change_of_sites_and_of_the_clock_are_two_messages(server: Served, client: Client) -> None:
    subscription = client.subscribe("app:begin")
    messages = subscription.messages()
    server.wall_clock.set_by(HOUR_NS)
    assert isinstance(next(messages), ClockChange)
    subscription.unsubscribe()
    assert not [message for message in messages if isinstance(message, Status) and not message.sites]


def test_intervals_are_as_long_as_they_were(server: Served, client: Client) -> None:
    subscription = client.aggregate("app:begin", Aggregate(functions=["count"]))
    server.wall_clock.set_by(HOUR_NS)
    server.fire(batch([time.monotonic_ns()], site_id=1))
    subscription.unsubscribe()
    (snapshot,) = [message for message in subscription.messages() if isinstance(message, Snapshot)]
    assert snapshot.end_ns - snapshot.begin_ns == snapshot.duration_ns + HOUR_NS
    assert 0 < snapshot.duration_ns < HOUR_NS


def test_open_spans_began_when_the_clock_said_so(server: Served, client: Client) -> None:
    subscription = client.subscribe("app:end", span=Span(start_selectors=["app:begin"]))
    (start,) = [each.site_id for each in subscription.sites if each.name == "begin"]
    began = time.monotonic_ns()
    # of a thread that has not ended
    server.fire(batch([began], site_id=start, pid=[os.getpid()], tid=[os.getpid()]))
    server.wall_clock.set_by(HOUR_NS)
    subscription.unsubscribe()
    list(subscription.messages())
    (span,) = subscription.open_spans[""].spans
    assert (span.begin_ns, span.begin_monotonic_ns) == (began + OFFSET_NS, began)
