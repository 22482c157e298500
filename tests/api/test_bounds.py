"""What is told to clients whose probes cost others too much, or take the kernel too long to disarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from stapsdtd.capture.engine import Scope
from stapsdtd.config import Limits, Quotas, Role
from stapsdtd.errors import ObjectPendingError
from stapsdtd.model import Object
from stapsdtd.procs.objects import open_object
from stapsdtd.sessions.subscription import EndReason
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, processes, served
from tests.support import wait_for
from tests.unit.samples import batch, site

BOUNDED = Role(
    "bounded", everybody=True, list=("all",), trace=("all",), quotas=Quotas(max_foreign_hits_per_second=1000)
)
REFUSED = pb.SiteStatus.STATE_REFUSED


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(tmp_path: Path, clock: Clock) -> Iterator[Served]:
    with served(tmp_path, roles=[BOUNDED], clock=clock) as started:
        yield started


@pytest.fixture
def pids() -> Iterator[list[int]]:
    with processes(2) as found:
        yield found


def test_unsubscribe_tells_that_it_is_still_disarming(server: Served) -> None:
    server.servicer.disarm_seconds = 0.05
    server.engine.disarmed = Future()
    first, second = (pb.UnsubscribeRequest(subscription_id=server.subscribe().subscription_id) for _ in range(2))
    assert server.stub.Unsubscribe(first, timeout=PATIENCE_SECONDS).still_disarming
    server.engine.disarmed.set_result(None)
    assert not server.stub.Unsubscribe(second, timeout=PATIENCE_SECONDS).still_disarming
    assert server.engine.calls.count("quiesced subscriptions of uid 0") == 2


def refusals(call: Any) -> list[str]:
    """Of the next message that has some."""
    for message in call:
        found = [status.reason for status in message.status.sites if status.state == REFUSED]
        if found:
            return found
    return []


def test_what_costs_others_too_much_is_disarmed_until_a_while_has_passed(
    server: Served, clock: Clock, pids: list[int]
) -> None:
    costly, cheap = server.file_object(site("a"), site("b")), server.file_object(site("c"), name="other")
    server.map(pids[0], costly)
    server.map(pids[1], cheap, "other")
    subscription = server.subscribe()
    call = server.stream(subscription.subscription_id)
    server.wait_until_streaming()
    ((subscription_key, _), *_) = server.engine.armed
    clock.now += 1
    server.engine.hits = {(subscription_key, costly.key): 312_000, (subscription_key, cheap.key): 900}
    reason = "cost other users' processes 312,900 hits/s; your role allows 1,000; armed again after 30 s"
    assert refusals(call) == [reason, reason]
    assert list(server.engine.armed) == [(subscription_key, cheap.key)]
    # neither another process nor another subscription brings it back
    server.map(pids[1], costly)
    assert list(server.engine.armed) == [(subscription_key, cheap.key)]
    again = server.subscribe("app:a")
    assert [(status.state, status.reason) for status in again.sites] == [(REFUSED, reason)]
    clock.now += 30
    wait_for(lambda: len(server.engine.armed) == 3, "it to be armed again")
    call.cancel()


def test_what_costs_others_too_much_is_armed_in_own_processes_until_a_while_has_passed(
    tmp_path: Path, clock: Clock, pids: list[int]
) -> None:
    role = Role("own", users=("root",), quotas=Quotas(max_foreign_hits_per_second=1000))
    with served(tmp_path, roles=[role], clock=clock) as server:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        server.subscribe("app:a")
        ((subscription_key, _),) = server.engine.armed

        def scope() -> Scope:
            (wanted,) = server.engine.armed[subscription_key, found.key].sites
            return wanted.scope

        assert scope() is None
        clock.now += 1
        server.engine.hits = {(subscription_key, found.key): 312_000}
        wait_for(lambda: scope() == frozenset(pids[:1]), "it to be confined")
        server.engine.hits = {}
        server.map(pids[1], found)
        assert scope() == frozenset(pids)
        # it need not be attached anew for fewer
        server.unmap(pids[0], found)
        assert scope() == frozenset(pids)
        clock.now += 30
        wait_for(lambda: scope() is None, "it to be armed everywhere")
        assert server.engine.calls.count("disarm") == 0


def test_the_first_rate_is_not_of_the_time_in_which_nobody_subscribed(
    server: Served, clock: Clock, pids: list[int]
) -> None:
    found = server.file_object(site("a"))
    server.map(pids[0], found)
    clock.now += 1000
    server.subscribe()
    ((subscription_key, _),) = server.engine.armed
    clock.now += 1
    server.engine.hits = {(subscription_key, found.key): 5_000}
    wait_for(lambda: server.subscriptions.arming.foreign.exceeded, "it to be noticed")


def test_what_waits_to_be_opened_is_refused_once_when_it_is_barred_meanwhile(
    tmp_path: Path, clock: Clock, pids: list[int]
) -> None:
    is_pending = False

    def open_later(found: Object, *arguments: Any) -> int:
        if is_pending:
            raise ObjectPendingError(found.path)
        return open_object(found, *arguments)

    def next_states() -> list[int]:
        return [status.state for status in next(call).status.sites]

    with served(tmp_path, roles=[BOUNDED], clock=clock, open_object=open_later) as server:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        server.subscribe()
        ((subscription_key, _),) = server.engine.armed
        is_pending = True
        waiting = server.subscribe()
        assert [status.state for status in waiting.sites] == [pb.SiteStatus.STATE_ARMING]
        call = server.stream(waiting.subscription_id)
        clock.now += 1
        server.engine.hits = {(subscription_key, found.key): 1_000_000}
        wait_for(lambda: server.subscriptions.arming.foreign.exceeded, "it to be noticed")
        server.in_control(server.subscriptions.housekeeping.clean_up)
        assert next_states() == [REFUSED]
        is_pending = False
        server.engine.hits = {}
        clock.now += 30
        assert next_states() == [pb.SiteStatus.STATE_ARMED]
        call.cancel()


def test_what_ended_meanwhile_counts_too(server: Served, clock: Clock, pids: list[int]) -> None:
    found = server.file_object(site("a"))
    server.map(pids[0], found)
    first = server.subscribe()
    ((subscription_key, _),) = server.engine.armed

    def end() -> None:
        clock.now += 1
        server.engine.hits = {(subscription_key, found.key): 1_000_000}
        server.subscriptions.unsubscribe(first.subscription_id, EndReason.UNSUBSCRIBED)

    server.in_control(end)
    wait_for(lambda: server.subscriptions.arming.foreign.exceeded, "it to be noticed")
    assert [status.state for status in server.subscribe().sites] == [REFUSED]


@pytest.mark.parametrize(
    ("limits", "quotas"),
    [(Limits(max_total_queue_bytes=5 << 20), Quotas()), (Limits(), Quotas(max_queue_bytes=5 << 20))],
)
def test_what_ended_subscriptions_hold_counts_until_it_is_forgotten(
    tmp_path: Path, limits: Limits, quotas: Quotas
) -> None:
    """A stream that nobody reads keeps an ended subscription's events for as long as its client likes."""
    role = Role("bounded", everybody=True, list=("all",), trace=("all",), quotas=quotas)
    with served(tmp_path, limits, [role], ended_kept_seconds=0.05) as server:

        def leave_events_behind() -> str:
            ident = server.subscribe(queue_bytes=2 << 20).subscription_id
            server.fire(batch(range(20_000), site_id=1))
            # as a stream whose client takes nothing
            readers.append(server.subscriptions.get(ident).wake_with(lambda: None))
            server.unsubscribe(ident)
            return ident

        readers: list[Callable[[], None]] = []
        ended: list[str] = []
        with pytest.raises(grpc.RpcError) as refused:
            ended.extend(leave_events_behind() for _ in range(10))
        error: Any = refused.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        kept = sum(server.subscriptions.get(ident).clauses[0].log.kept_bytes for ident in ended)
        assert 3 << 20 < kept <= 5 << 20
        for stop_reading in readers:
            stop_reading()
        for ident in ended:
            wait_for(partial(server.is_forgotten, ident), "the events to be forgotten")
        leave_events_behind()
