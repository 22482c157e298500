"""What is to be matched for one client, however much it is, nobody else waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from stapsdtd.model import Object
from stapsdtd.runtime.fair_thread import Queue
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, processes, served
from tests.support import wait_for
from tests.unit.samples import site

SITES = 2000
SELECTORS = ["app:n1", "app:n19*", "other:*"]
CHOSEN = 1 + 1 + 10 + 100


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as started:
        yield started


@pytest.fixture
def pids() -> Iterator[list[int]]:
    with processes(2) as found:
        yield found


@contextmanager
def matching_held(server: Served) -> Iterator[None]:
    """The matching thread does nothing else inside."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(PATIENCE_SECONDS)

    server.matching.submit(Queue("another"), hold)
    assert held.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        release.set()


def large(server: Served, name: str = "app") -> Object:
    return server.file_object(*(site(f"n{number}", number) for number in range(SITES)), name=name)


def test_subscribe_waits_for_it_and_others_do_not(server: Served, pids: list[int]) -> None:
    server.map(pids[0], large(server))
    server.map(pids[1], server.file_object(site("few", provider="few"), name="few"), "few")
    with ThreadPoolExecutor() as pool:
        with matching_held(server):
            subscribed = pool.submit(server.subscribe, *SELECTORS)
            wait_for(lambda: server.matching.backlog().waiting, "the matching thread to be asked")
            # what is little is matched at once
            assert [each.name for each in server.subscribe("few:*").sites] == ["few"]
            assert server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS).probes == SITES + 1
            assert not subscribed.done()
        response = subscribed.result(PATIENCE_SECONDS)
    assert len(response.sites) == CHOSEN
    assert {each.state for each in response.sites} == {pb.SiteStatus.STATE_ARMED}


def test_what_appears_later_is_matched_then_and_armed(server: Served, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("n1"), name="first"), "first")
    call = server.stream(server.subscribe(*SELECTORS).subscription_id)
    with matching_held(server):
        found = large(server)
        server.begin_map(pids[0], found)
        # a second process is no reason to search again
        server.begin_map(pids[1], found)
        assert server.matching.backlog().waiting == 1
    assert len(next(call).status.sites) == CHOSEN
    call.cancel()


def test_object_that_is_gone_by_then_is_not_armed(server: Served, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("n1"), name="first"), "first")
    ident = server.subscribe(*SELECTORS).subscription_id
    before = len(server.engine.armed)
    with matching_held(server):
        found = large(server)
        server.begin_map(pids[0], found)
        server.begin_unmap(pids[0], found)
    server.settle()
    assert len(server.engine.armed) == before
    server.unsubscribe(ident)


def test_subscription_that_is_gone_by_then_is_not_matched(server: Served, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("n1"), name="first"), "first")
    ident = server.subscribe(*SELECTORS).subscription_id
    with matching_held(server):
        server.begin_map(pids[0], large(server))
        assert server.matching.backlog().waiting == 1
        server.unsubscribe(ident)
        assert server.matching.backlog().waiting <= 1
    server.settle()
    assert not server.engine.armed


def test_list_that_is_cancelled_is_not_matched_further(server: Served, pids: list[int]) -> None:
    server.map(pids[0], large(server))
    with matching_held(server):
        with pytest.raises(grpc.RpcError) as raised:
            server.stub.ListProbes(pb.ListProbesRequest(selectors=SELECTORS), timeout=0.2)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.settle()
    listed = server.stub.ListProbes(pb.ListProbesRequest(selectors=SELECTORS), timeout=PATIENCE_SECONDS)
    assert len(listed.probes) == CHOSEN
