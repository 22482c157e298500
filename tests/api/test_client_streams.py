"""Streams of the clients that wait: for an event, for so long, and until somebody gives up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from stapsdtd.client import AsyncClient, Client, ColumnBatch, Descriptions, Encoding, EventBatch, Status
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.fake_server import PATIENCE_SECONDS, FakeServer, armed, run, serving

EVENTS = 300


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


def fire_now_and_then(server: FakeServer) -> None:
    for number in range(EVENTS // 3):
        server.fire(3)
        time.sleep(0.0005 * (number % 7))
    server.end(pb.End.REASON_UNSUBSCRIBED)


def test_a_timeout_loses_no_event(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        seen: list[int] = []
        timeouts = 0
        async with client.subscribe("*:*") as subscription:
            firing = threading.Thread(target=fire_now_and_then, args=[server])
            firing.start()
            stream = subscription.events()
            while True:
                try:
                    event = await asyncio.wait_for(anext(stream), 0.0003)
                except TimeoutError:
                    timeouts += 1
                except StopAsyncIteration:
                    break
                else:
                    seen.append(event.seq)
            firing.join()
        assert seen == list(range(1, EVENTS + 1))
        assert timeouts > 20

    run(server, test)
    assert len(server.asked("StreamRequest")) == 1


def test_a_timeout_of_an_iterator_that_is_dropped_loses_no_event(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        seen: list[int] = []
        async with client.subscribe("*:*") as subscription:
            firing = threading.Thread(target=fire_now_and_then, args=[server])
            firing.start()
            while len(seen) < EVENTS:
                try:
                    async with asyncio.timeout(0.004):
                        async for batch in subscription.columns():
                            seen += batch.seq.tolist()
                except TimeoutError:
                    pass
            firing.join()
        assert seen == list(range(1, EVENTS + 1))

    run(server, test)
    assert len(server.asked("StreamRequest")) > 2


def test_closing_a_stream_that_waits_ends_its_call(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        async with client.subscribe("*:*") as subscription:
            stream = subscription.messages()
            assert isinstance(await anext(stream), Descriptions)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.2)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.gather(
                    *(each for each in asyncio.all_tasks() if each is not asyncio.current_task()),
                    return_exceptions=True,
                )

    run(server, test)


def test_an_error_is_raised_once_and_ends_the_stream(server: FakeServer) -> None:
    server.sites = [armed(1, pb.SiteStatus.STATE_REFUSED, "no room")]

    async def test(client: AsyncClient) -> None:
        async with client.subscribe("*:*") as subscription:
            stream = subscription.events()
            with pytest.raises(Exception, match="every site that matches was refused"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(server, test)


def test_idle_streams_end_and_go_on(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        async with client.subscribe("*:*") as subscription:
            server.fire(2)
            assert [event.seq async for event in subscription.events(idle_seconds=0.2)] == [1, 2]
            assert subscription.end is None
            server.fire(1)
            assert [batch.seq.tolist() async for batch in subscription.columns(idle_seconds=0.2)] == [[3]]
            began = time.monotonic()
            assert not [each async for each in subscription.snapshots(idle_seconds=0.3)]
            assert 0.3 <= time.monotonic() - began < 5

    run(server, test)


def test_idle_streams_of_the_blocking_client_end_and_go_on(server: FakeServer) -> None:
    with Client(server.target) as client, client.subscribe("*:*") as subscription:
        server.fire(2)
        assert [event.seq for event in subscription.events(idle_seconds=0.2)] == [1, 2]
        assert subscription.end is None
        server.fire(1)
        assert [batch.seq.tolist() for batch in subscription.columns(idle_seconds=0.2)] == [[3]]
        began = time.monotonic()
        assert not list(subscription.snapshots(idle_seconds=0.3))
        assert 0.3 <= time.monotonic() - began < 5
        server.fire(1)
        kinds = [type(each) for each in subscription.messages(Encoding.COLUMNS, idle_seconds=0.2)]
        assert ColumnBatch in kinds
    assert not [thread for thread in threading.enumerate() if thread.name == "idle-timer"]


def test_what_is_not_waited_for_does_not_count(server: FakeServer) -> None:
    done = threading.Event()

    def tell() -> None:
        while not done.wait(0.05):
            server.tell(pb.StreamResponse(status=pb.Status(sites=[armed()])))

    telling = threading.Thread(target=tell)
    telling.start()
    try:
        with Client(server.target) as client, client.subscribe("*:*") as subscription:
            assert not list(subscription.events(idle_seconds=0.4))
            heard = 0
            for message in subscription.messages(idle_seconds=0.4):
                heard += isinstance(message, Status)
                if heard == 12:
                    break
            assert heard == 12
    finally:
        done.set()
        telling.join()


def test_what_the_reader_does_in_between_does_not_count(server: FakeServer) -> None:
    server.fire(2)
    with Client(server.target) as client, client.subscribe("*:*") as subscription:
        seen = 0
        for message in subscription.messages(idle_seconds=0.3):
            time.sleep(0.5)
            if isinstance(message, EventBatch):
                seen += len(message.events)
                if seen == 2:
                    server.fire(1)
        assert seen == 3
