"""Subscriptions to processes by pid: they end with the last of them, and mean no other that gets the pid."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import grpc
import pytest

from stapsdtd.model import Object
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import Served, refused
from tests.support import wait_for
from tests.unit.samples import batch, site

Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def children() -> Iterator[Processes]:
    started = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield started
    for child in started:
        end(child)


@pytest.fixture
def app(server: Served, children: Processes) -> Object:
    found = server.file_object(site("a"))
    for child in children:
        server.map(child.pid, found)
    return found


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def subscribe(server: Served, *pids: int) -> pb.SubscribeResponse:
    return server.subscribe("app:*", scope=pb.Scope(pids=pids))


def events_of(messages: list[pb.StreamResponse]) -> list[int]:
    return [event.pid for message in messages for event in message.rows.events]


def remaining(server: Served, ident: str) -> frozenset[int] | None:
    return server.subscriptions.get(ident).pids


def test_pid_of_no_process_is_refused(server: Served, children: Processes) -> None:
    end(children[0])
    gone = children[0].pid
    code, details = refused(lambda: subscribe(server, children[1].pid, gone))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"scope.pids: there is no process {gone}"
    assert server.held() == []


@pytest.mark.usefixtures("app")
def test_stream_ends_with_the_last_process(server: Served, children: Processes) -> None:
    first, second = (child.pid for child in children)
    answer = subscribe(server, first, second)
    call = server.stream(answer.subscription_id)
    server.wait_until_streaming()
    server.fire(batch([time.monotonic_ns()] * 2, pid=[first, second]))
    end(children[0])
    server.fire(batch([time.monotonic_ns()], pid=[second]))
    end(children[1])
    messages = list(call)
    assert events_of(messages) == [first, second, second]
    assert messages[-1].end.reason == pb.End.REASON_PROCESSES_ENDED
    assert messages[-1].end.account.delivered == 3
    assert server.held() == []
    assert server.engine.armed == {}
    # a client may not have seen the end yet
    assert server.unsubscribe(answer.subscription_id) == messages[-1].end.account


@pytest.mark.usefixtures("app")
def test_without_a_stream_its_events_are_kept_for_the_lease(server: Served, children: Processes) -> None:
    pid = children[0].pid
    ident = subscribe(server, pid).subscription_id
    server.fire(batch([time.monotonic_ns()], pid=[pid]))
    end(children[0])
    wait_for(lambda: remaining(server, ident) == frozenset(), "the exit to be noticed")
    assert [each.subscription_id for each in server.held()] == [ident]
    messages = list(server.stream(ident))
    assert events_of(messages) == [pid]
    assert messages[-1].end.reason == pb.End.REASON_PROCESSES_ENDED


def test_another_process_with_the_pid_is_not_meant(server: Served, children: Processes, app: Object) -> None:
    gone, other = (child.pid for child in children)
    ident = subscribe(server, gone, other).subscription_id
    end(children[0])
    wait_for(lambda: remaining(server, ident) == frozenset({other}), "the exit to be noticed")
    later = time.monotonic_ns()
    server.fire(batch([later, later], pid=[gone, other]))
    (held,) = server.held()
    assert (held.account.filtered, held.account.in_flight) == (1, 1)
    # nor is anything armed for it
    found = server.file_object(site("b"), name="later")
    server.map(gone, found, "later")
    assert {target.object.key for target in server.engine.armed.values()} == {app.key}
    server.map(other, found, "later")
    armed = server.engine.armed[1, found.key]
    assert [wanted.scope for wanted in armed.sites] == [frozenset({other})]


def test_unsubscribed_it_follows_no_process(server: Served, children: Processes) -> None:
    ident = subscribe(server, *(child.pid for child in children)).subscription_id
    server.unsubscribe(ident)
    end(children[0])
    code, _ = refused(lambda: subscribe(server, children[0].pid))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert subscribe(server, children[1].pid).subscription_id != ident
