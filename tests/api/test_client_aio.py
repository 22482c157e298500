"""The asyncio client; what it shares with the synchronous one is tested there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from stapsdtd.client import (
    AsyncClient,
    EventBatch,
    Interruption,
    InvalidRequestError,
    ProbeAdded,
    ServerUnavailableError,
    SnapshotComplete,
    StillSubscribedError,
)
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.fake_server import FakeServer, bad_request, probe, run, serving


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


def test_unary_calls(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        assert (await client.info()).version == "1.2.3"
        assert [found.name for found in await client.list_probes()] == ["query__start"]
        assert await client.subscriptions() == ()
        server.refuse = bad_request("selectors[0]", "too many stars")
        with pytest.raises(InvalidRequestError, match="too many stars"):
            await client.list_probes("**:*")

    run(server, test)


def test_unsubscribe_that_is_refused_by_rate_is_tried_again(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        async with client.subscribe("*:*"):
            server.refuse_unsubscribe = 3

    run(server, test)
    assert len(server.asked("UnsubscribeRequest")) == 4
    assert not server.subscribed


def test_who_cannot_unsubscribe_is_told_that_it_stays_armed(server: FakeServer) -> None:
    server.refuse_unsubscribe = 1000

    async def test() -> None:
        async with AsyncClient(server.target, timeout_seconds=1) as client, await client.subscribe("*:*"):
            pass

    with pytest.raises(StillSubscribedError, match=r"unsubscribe sub-1: .* stays armed until its lease expires, 30 s"):
        asyncio.run(test())
    assert server.subscribed


def test_watch_probes(server: FakeServer) -> None:
    kinds = pb.WatchProbesResponse
    server.changes = [kinds(change=kinds.CHANGE_ADDED, probe=probe()), kinds(change=kinds.CHANGE_SNAPSHOT_COMPLETE)]

    async def test(client: AsyncClient) -> None:
        changes = client.watch_probes()
        assert isinstance(await anext(changes), ProbeAdded)
        assert isinstance(await anext(changes), SnapshotComplete)

    run(server, test)


def test_events_and_columns(server: FakeServer) -> None:
    server.fire(3)
    server.end(pb.End.REASON_UNSUBSCRIBED)

    async def test(client: AsyncClient) -> None:
        async with client.subscribe("postgresql:*") as subscription:
            assert [event.values async for event in subscription.events()] == [("SELECT 1", 42)] * 3
            assert [batch.count async for batch in subscription.columns(from_seq=2)] == [2]

    run(server, test)


def test_a_broken_stream_goes_on_without_gap_or_double(server: FakeServer) -> None:
    server.fire(2)
    server.break_after = 2

    async def test(client: AsyncClient) -> None:
        seen = []
        async with await client.subscribe("*:*") as subscription:
            async for message in subscription.messages():
                if isinstance(message, EventBatch):
                    seen += [event.seq for event in message.events]
                elif isinstance(message, Interruption):
                    server.fire(2)
                    server.end(pb.End.REASON_UNSUBSCRIBED)
        assert seen == [1, 2, 3, 4]

    run(server, test)
    assert [request.from_seq for request in server.asked("StreamRequest")] == [1, 3]


def test_unsubscribe_while_the_stream_is_read(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        subscription = await client.subscribe("*:*")

        async def read() -> list[int]:
            return [event.seq async for event in subscription.events()]

        reading = asyncio.create_task(read())
        await asyncio.to_thread(server.wait_for, "StreamRequest")
        server.fire(2)
        assert (await subscription.unsubscribe()).fired == 2
        assert await reading == [1, 2]
        assert subscription.account is not None
        assert subscription.account.delivered == 2

    run(server, test)


def test_nobody_there() -> None:
    async def ask() -> None:
        async with AsyncClient("unix:/nowhere/sock") as client:
            await client.info()

    with pytest.raises(ServerUnavailableError):
        asyncio.run(ask())


def test_subscribe_may_be_awaited_by_a_task(server: FakeServer) -> None:
    async def test(client: AsyncClient) -> None:
        subscription = await asyncio.create_task(client.subscribe("*:*"))
        assert subscription.id == "sub-1"
        async with subscription as entered:
            assert entered is subscription

    run(server, test)
    assert len(server.asked("UnsubscribeRequest")) == 1


def test_subscribe_that_is_refused_where_it_is_entered(server: FakeServer) -> None:
    server.refuse = bad_request("selectors[0]", "too many stars")

    async def test(client: AsyncClient) -> None:
        with pytest.raises(InvalidRequestError, match="too many stars"):
            async with client.subscribe("**:*"):
                raise AssertionError

    run(server, test)
    assert not server.asked("UnsubscribeRequest")
