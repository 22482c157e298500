"""What a client is told while files and the kernel take their time: nobody waits for what is another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from stapsdtd.client import Client, Descriptions, EventBatch, SiteState
from stapsdtd.config import OPERATOR
from stapsdtd.errors import ObjectGoneError, ObjectPendingError, TracefsRejectedError
from stapsdtd.model import Mapping, Object, Problem
from stapsdtd.procs.objects import open_object
from stapsdtd.runtime.futures import finished, unfinished
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Hold, Served, processes, served
from tests.support import wait_for
from tests.unit.samples import batch, site

ARMED, REFUSED = pb.SiteStatus.STATE_ARMED, pb.SiteStatus.STATE_REFUSED
ARMING, DISARMED, DISARMING = pb.SiteStatus.STATE_ARMING, pb.SiteStatus.STATE_DISARMED, pb.SiteStatus.STATE_DISARMING


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
    with served(tmp_path, clock=clock) as started:
        started.servicer.arm_seconds = started.servicer.disarm_seconds = 0.05
        yield started


@pytest.fixture
def pids() -> Iterator[list[int]]:
    with processes(2) as found:
        yield found


@pytest.fixture
def stuck(server: Served) -> Iterator[Callable[[str], Hold]]:
    """Makes the engine's method of a name wait until the hold is released."""

    def make(method: str) -> Hold:
        hold = server.engine.held[method] = Hold()
        return hold

    yield make
    for each in server.engine.held.values():
        each.release()


def states(statuses: Any) -> list[tuple[str, int]]:
    return [(status.name, status.state) for status in statuses]


def next_states(call: Any) -> list[tuple[str, int]]:
    return states(next(call).status.sites)


def info(server: Served) -> pb.GetServerInfoResponse:
    return server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS)


def test_subscribe_tells_what_is_still_arming_and_the_stream_what_became_of_it(
    server: Served, pids: list[int], stuck: Callable[[str], Hold]
) -> None:
    found = server.file_object(site("a"), site("b", 2))
    server.map(pids[0], found)
    server.engine.refuse = {"b": "no"}
    arming = stuck("arm")
    first = server.subscribe()
    assert states(first.sites) == [("a", ARMING), ("b", ARMING)]
    # of another client, or the same
    second = server.subscribe("other:*")
    assert list(second.sites) == []
    running = info(server).arming
    assert (running.running, running.waiting) == (f"arming {found.path}", 1)
    assert [held.account.sites for held in server.held()] == [0, 0]
    call = server.stream(first.subscription_id)
    arming.release()
    assert next_states(call) == [("a", ARMED), ("b", REFUSED)]
    assert [held.account.sites for held in server.held()] == [1, 0]
    call.cancel()
    server.settle()
    assert info(server).arming == pb.Arming()


def test_path_is_told_only_those_who_may_list_it(tmp_path: Path, pids: list[int]) -> None:
    with served(tmp_path, roles=[replace(OPERATOR, list=("own",))]) as server:
        arming = server.engine.held["arm"] = Hold()
        server.map(pids[0], server.file_object(site("a")))
        server.servicer.arm_seconds = 0.05
        server.subscribe()
        told = info(server).arming
        assert told.running == ""
        assert told.running_ms > 0
        arming.release()


def test_list_and_subscribe_wait_for_files_of_root_that_are_still_being_parsed(server: Served, pids: list[int]) -> None:
    server.servicer.arm_seconds = PATIENCE_SECONDS
    server.watcher.refreshed = unfinished()
    listed = server.stub.ListProbes.future(pb.ListProbesRequest(), timeout=PATIENCE_SECONDS)
    request = pb.SubscribeRequest(selectors=["app:*"])
    subscribed = server.stub.Subscribe.future(request, timeout=PATIENCE_SECONDS)
    wait_for(lambda: server.engine.sinks, "the subscription to be opened")
    # what tells of the wait does not wait
    assert info(server).probes == 0
    server.map(pids[0], server.file_object(site("a")))
    assert not listed.done()
    assert not subscribed.done()
    parsed, server.watcher.refreshed = server.watcher.refreshed, finished()
    parsed.set_result(None)
    assert [probe.name for probe in listed.result().probes] == ["a"]
    assert states(subscribed.result().sites) == [("a", ARMED)]


def test_engine_that_takes_its_time_to_begin_and_then_cannot(
    server: Served, pids: list[int], stuck: Callable[[str], Hold]
) -> None:
    server.map(pids[0], server.file_object(site("a")))
    error = TracefsRejectedError("instances", "mkdir", 12, "")
    server.engine.failures["open"] = error
    opening = stuck("open")
    answer = server.subscribe()
    assert states(answer.sites) == [("a", ARMING)]
    call = server.stream(answer.subscription_id)
    opening.release()
    (status,) = next(call).status.sites
    assert (status.state, status.reason) == (REFUSED, str(error))
    server.unsubscribe(answer.subscription_id)
    assert "close" not in server.engine.calls


def test_what_appears_is_told_when_it_is_late(
    server: Served, pids: list[int], clock: Clock, stuck: Callable[[str], Hold]
) -> None:
    call = server.stream(server.subscribe().subscription_id)
    arming = stuck("arm")
    server.begin_map(pids[0], server.file_object(site("a")))
    assert arming.began.wait(PATIENCE_SECONDS)
    server.begin_in_control(server.subscriptions.housekeeping.check_progress)
    clock.now += 1
    for _ in range(2):
        server.begin_in_control(server.subscriptions.housekeeping.check_progress)
    assert next_states(call) == [("a", ARMING)]
    arming.release()
    assert next_states(call) == [("a", ARMED)]
    call.cancel()


def test_what_goes_is_told_when_it_is_late(
    server: Served, pids: list[int], clock: Clock, stuck: Callable[[str], Hold]
) -> None:
    found = server.file_object(site("a"), path="/memfd:jit")
    server.map(pids[0], found)
    call = server.stream(server.subscribe().subscription_id)
    disarming = stuck("disarm")
    server.begin_unmap(pids[0], found)
    assert disarming.began.wait(PATIENCE_SECONDS)
    clock.now += 1
    for _ in range(2):
        server.begin_in_control(server.subscriptions.housekeeping.check_progress)
    assert next_states(call) == [("a", DISARMING)]
    disarming.release()
    assert next_states(call) == [("a", DISARMED)]
    server.settle()
    assert server.engine.armed == {}
    call.cancel()


def test_what_goes_before_its_turn_is_never_armed(
    server: Served, pids: list[int], clock: Clock, stuck: Callable[[str], Hold]
) -> None:
    call = server.stream(server.subscribe().subscription_id)
    arming = stuck("arm")
    first = server.file_object(site("a"), name="first", path="/memfd:first")
    second = server.file_object(site("b"), name="second", path="/memfd:second")
    server.begin_map(pids[0], first, "first")
    assert arming.began.wait(PATIENCE_SECONDS)
    server.begin_map(pids[0], second, "second")
    clock.now += 1
    server.begin_in_control(server.subscriptions.housekeeping.check_progress)
    for found in (first, second):
        server.begin_unmap(pids[0], found)
    arming.release()
    server.settle()
    assert server.engine.calls.count("arm") == 1
    assert server.engine.armed == {}
    told: list[tuple[str, int]] = []
    while len(told) < 4:
        told += next_states(call)
    assert told == [("a", ARMING), ("b", ARMING), ("b", DISARMED), ("a", DISARMED)]
    assert server.held()[0].account.sites == 0
    call.cancel()


def test_disarming_comes_before_everything_that_waits(
    server: Served, pids: list[int], stuck: Callable[[str], Hold]
) -> None:
    """Else a file that was written to would stay patched until its turn, and a later arming could be undone."""
    call = server.stream(server.subscribe().subscription_id)
    gone = server.file_object(site("gone"), name="gone", path="/memfd:gone")
    server.map(pids[0], gone, "gone")
    assert next_states(call) == [("gone", ARMED)]
    arming = stuck("arm")
    for number in range(3):
        found = server.file_object(site(f"a{number}"), name=f"app{number}")
        server.begin_map(pids[0], found, f"app{number}")
    assert arming.began.wait(PATIENCE_SECONDS)
    server.begin_unmap(pids[0], gone)
    server.begin_map(pids[1], gone, "gone")
    before = len(server.engine.calls)
    arming.release()
    server.settle()
    assert server.engine.calls[before:] == ["arm", "disarm", "arm", "arm", "arm"]
    assert len(server.engine.armed) == 4
    call.cancel()


def test_object_whose_first_process_ended_meanwhile_is_armed_through_the_others(
    tmp_path: Path, pids: list[int]
) -> None:
    tried: list[set[int]] = []

    def open_of_second(found: Object, mappings: Iterable[tuple[int, Mapping]], *arguments: Any) -> int:
        living = {pid: mapping for pid, mapping in mappings if pid == pids[1]}
        tried.append(set(living))
        return open_object(found, living.items(), *arguments)

    with served(tmp_path, open_object=open_of_second) as server:
        call = server.stream(server.subscribe().subscription_id)
        found = server.file_object(site("a"), path="/memfd:jit")
        held = threading.Event()
        server.arming.submit(None, lambda: held.wait(PATIENCE_SECONDS))
        server.begin_map(pids[0], found)
        server.begin_map(pids[1], found)
        server.begin_unmap(pids[0], found)
        held.set()
        assert next_states(call) == [("a", ARMED)]
        assert tried == [set(), {pids[1]}]
        call.cancel()


@pytest.mark.parametrize(
    ("error", "told"),
    [(ObjectGoneError("/app"), (DISARMED, "")), (ZeroDivisionError("a bug"), (REFUSED, "a bug"))],
    ids=["gone", "defect"],
)
def test_what_was_told_to_be_arming_is_told_how_it_ended(
    tmp_path: Path, pids: list[int], error: Exception, told: tuple[int, str]
) -> None:
    released = threading.Event()

    def open_late(*_: Any) -> int:
        assert released.wait(PATIENCE_SECONDS)
        raise error

    with served(tmp_path, open_object=open_late) as server:
        server.servicer.arm_seconds = 0.05
        server.map(pids[0], server.file_object(site("a")))
        answer = server.subscribe()
        assert states(answer.sites) == [("a", ARMING)]
        call = server.stream(answer.subscription_id)
        released.set()
        (status,) = next(call).status.sites
        assert (status.state, status.reason) == told
        call.cancel()


def test_unsubscribe_does_not_wait_for_the_arming(
    server: Served, pids: list[int], stuck: Callable[[str], Hold]
) -> None:
    for name in ("first", "second"):
        server.map(pids[0], server.file_object(site("a"), name=name), name)
    arming = stuck("arm")
    ident = server.subscribe().subscription_id
    request = pb.UnsubscribeRequest(subscription_id=ident)
    assert server.stub.Unsubscribe(request, timeout=PATIENCE_SECONDS).still_disarming
    arming.release()
    server.settle()
    assert server.engine.armed == {}
    # the other one waited, and was not wanted any more when its turn came
    assert [call for call in server.engine.calls if "quiesced" not in call] == ["open", "arm", "close"]
    assert server.subscriptions.totals.metrics().subscriptions == 0


def test_site_that_fires_before_its_arming_is_over_is_told_at_the_end(
    server: Served, pids: list[int], stuck: Callable[[str], Hold]
) -> None:
    server.servicer.arm_seconds = 0.05
    server.map(pids[0], server.file_object(site("a")))
    arming = stuck("arm")
    answer = server.subscribe()
    assert states(answer.sites) == [("a", ARMING)]
    server.fire(batch([1, 2], site_id=answer.sites[0].site_id))
    request = pb.UnsubscribeRequest(subscription_id=answer.subscription_id)
    assert server.stub.Unsubscribe(request, timeout=PATIENCE_SECONDS).still_disarming
    arming.release()
    told = [each.state for message in server.stream(answer.subscription_id) for each in message.status.sites]
    assert ARMED in told


def test_client_counts_a_site_whose_events_came_before_it_was_told(
    server: Served, pids: list[int], stuck: Callable[[str], Hold]
) -> None:
    server.servicer.arm_seconds = 0.05
    server.map(pids[0], server.file_object(site("a")))
    arming = stuck("arm")
    with Client(f"unix:{server.socket}") as client, client.subscribe("*:a") as subscription:
        (told,) = subscription.sites
        assert told.state is SiteState.ARMING
        server.fire(batch([1], site_id=told.site_id))
        messages = iter(subscription.messages())
        assert isinstance(next(messages), Descriptions)
        assert isinstance(next(messages), EventBatch)
        assert subscription.sites_armed == 1
        arming.release()


def test_file_that_cannot_be_opened_yet_is_armed_when_it_can(tmp_path: Path, pids: list[int]) -> None:
    is_pending = True

    def open_later(found: Object, *arguments: Any) -> int:
        if is_pending:
            raise ObjectPendingError(found.path)
        return open_object(found, *arguments)

    with served(tmp_path, open_object=open_later) as server:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        answer = server.subscribe()
        assert states(answer.sites) == [("a", ARMING)]
        call = server.stream(answer.subscription_id)
        server.in_control(server.subscriptions.housekeeping.clean_up)
        is_pending = False
        server.in_control(server.subscriptions.housekeeping.clean_up)
        assert next_states(call) == [("a", ARMED)]
        call.cancel()


def test_many_sites_are_armed_in_turns_with_what_others_want(server: Served, pids: list[int]) -> None:
    server.servicer.arm_seconds = PATIENCE_SECONDS
    large = server.file_object(*(site(f"n{number}", number) for number in range(2200)), name="large")
    server.map(pids[0], large, "large")
    server.map(pids[1], server.file_object(site("a", provider="few"), name="few"), "few")
    arming = server.engine.held["arm"] = Hold()
    request = pb.SubscribeRequest(selectors=["app:*"])
    many = server.stub.Subscribe.future(request, timeout=PATIENCE_SECONDS)
    assert arming.began.wait(PATIENCE_SECONDS)
    few = server.stub.Subscribe.future(pb.SubscribeRequest(selectors=["few:*"]), timeout=PATIENCE_SECONDS)
    wait_for(lambda: server.arming.backlog().waiting >= 2, "the other subscription to be opened, and to wait")
    arming.release()
    assert states(few.result().sites) == [("a", ARMED)]
    assert {state for _, state in states(many.result().sites)} == {ARMED}
    assert len(many.result().sites) == 2200
    # the first part, the other's object, and the rest
    sizes = [len(sites) for sites in server.engine.parts]
    assert sorted(sizes) == [1, 200, 1000, 1000]
    assert sizes[-1] != 1


def test_object_that_is_unmapped_while_it_is_armed_in_parts_is_not_armed(server: Served, pids: list[int]) -> None:
    large = server.file_object(*(site(f"n{number}", number) for number in range(2200)), path="/memfd:jit")
    server.map(pids[0], large)
    arming = server.engine.held["arm"] = Hold()
    ident = server.subscribe().subscription_id
    assert arming.began.wait(PATIENCE_SECONDS)
    server.begin_unmap(pids[0], large)
    arming.release()
    server.settle()
    assert not server.engine.armed
    assert len(server.engine.parts) < 3
    # it can be armed again, and another one, up to the quota
    server.map(pids[1], large)
    (target,) = server.engine.armed.values()
    assert len(target.sites) == 2200
    server.unsubscribe(ident)


def test_more_sites_than_a_subscription_may_have_of_a_file_are_refused_with_the_limit(
    server: Served, pids: list[int]
) -> None:
    server.servicer.arm_seconds = PATIENCE_SECONDS
    server.map(pids[0], server.file_object(*(site(f"n{number}", number) for number in range(10_001))))
    (refused,) = server.subscribe().sites
    assert refused.state == REFUSED
    assert refused.reason == (
        "10001 sites of this file match, and a subscription may have 10000 of one; name fewer probes"
    )
    response = server.subscribe("app:n*0")
    assert len(response.sites) == 1001


REASON = "no nop at the location"


def test_notes_that_cannot_be_used_are_refused(server: Served, pids: list[int]) -> None:
    bad = [Problem("app", "bad", REASON), Problem("other", "bad", REASON), Problem("", "", "truncated")]
    server.map(pids[0], server.file_object(site("good"), problems=bad))
    response = server.subscribe("app:*")
    assert [(each.name, each.state, each.offset, each.reason) for each in response.sites] == [
        ("good", ARMED, 0x1000, ""), ("bad", REFUSED, 0, REASON),
    ]  # fmt: skip
    ((target),) = server.engine.armed.values()
    assert [wanted.site.name for wanted in target.sites] == ["good"]
    assert [each.reason for each in server.subscribe("other:bad(arg3:str)", require_match=True).sites] == [REASON]
    with pytest.raises(grpc.RpcError, match=r"other:bad in /.*: no nop at the location"):
        server.subscribe("other:bad", all_or_nothing=True)


def test_duplicates_limit_their_site_alone(server: Served, pids: list[int]) -> None:
    first, second = site("good", 0x1000), site("good", 0x1010)
    twice = Problem("app", "good", "another note has the same location", duplicates=first.site_offset)
    server.map(pids[0], server.file_object(first, second, problems=[twice]))
    response = server.subscribe("app:*", all_or_nothing=True)
    assert [(each.offset, each.state, each.reason) for each in response.sites] == [
        (0x1000, ARMED, twice.reason), (0x1010, ARMED, ""),
    ]  # fmt: skip


def test_notes_that_cannot_be_used_are_refused_when_they_appear(server: Served, pids: list[int]) -> None:
    response = server.subscribe("app:bad", where="arg0 == 1 && str(arg1) == 'x'", fields=["arg2"])
    stream = server.stream(response.subscription_id)
    server.map(pids[0], server.file_object(problems=[Problem("app", "bad", REASON)]))
    assert next_states(stream) == [("bad", REFUSED)]
    assert server.unsubscribe(response.subscription_id).fired == 0
