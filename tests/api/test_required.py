"""What a client requires of the sites that match at first: at least one, or all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, processes, refused
from tests.unit.samples import site

ARMED, REFUSED = pb.SiteStatus.STATE_ARMED, pb.SiteStatus.STATE_REFUSED


@pytest.fixture
def pid() -> Iterator[int]:
    with processes(1) as (found,):
        yield found


def states(response: pb.SubscribeResponse) -> list[tuple[str, int]]:
    return [(status.name, status.state) for status in response.sites]


def test_match_is_required(server: Served, pid: int) -> None:
    server.map(pid, server.file_object(site("a")))
    nothing = refused(lambda: server.subscribe("app:b", require_match=True))
    assert nothing == (grpc.StatusCode.NOT_FOUND, "no probe matches")
    assert server.held() == []
    assert states(server.subscribe("app:a", require_match=True)) == [("a", ARMED)]
    # unless it is asked for, a probe is waited for
    assert states(server.subscribe("app:b")) == []


def test_match_may_be_refused(server: Served, pid: int) -> None:
    server.engine.refuse = {"a": "no"}
    server.map(pid, server.file_object(site("a")))
    assert states(server.subscribe("app:a", require_match=True)) == [("a", REFUSED)]


def test_all_or_nothing(server: Served, pid: int) -> None:
    found = server.file_object(site("a"), site("b", 2), site("c", 3))
    server.map(pid, found)
    assert [state for _, state in states(server.subscribe("app:*", all_or_nothing=True))] == [ARMED] * 3
    server.engine.refuse = {"b": "no room", "c": "no"}
    code, details = refused(lambda: server.subscribe("app:*", all_or_nothing=True))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == f"2 of 3 sites are not armed, such as app:b at {found.path}+0x2: no room"
    assert len(server.held()) == 1
    assert {key for key, _ in server.engine.armed} == {1}
    # of nothing that matches, all is armed
    assert states(server.subscribe("app:z", all_or_nothing=True)) == []


def test_what_is_still_arming_is_not_all(server: Served, pid: int) -> None:
    server.map(pid, server.file_object(site("a")))
    server.servicer.arm_seconds = 0.05
    release = threading.Event()
    server.arming.submit(None, lambda: release.wait(PATIENCE_SECONDS))
    code, details = refused(lambda: server.subscribe("app:*", all_or_nothing=True))
    release.set()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.endswith(": still arming")
    server.settle()
    assert server.held() == []
    assert server.engine.armed == {}


def test_probes_that_are_excluded_are_not_chosen(server: Served, pid: int) -> None:
    found = server.file_object(site("step__one"), site("sale"), site("step__one", 0x40, provider="other"))
    server.map(pid, found)
    response = server.subscribe("*:*", "app:step__one", exclude=["app:step-one", "app:missing"])
    assert sorted((each.provider, each.name) for each in response.sites) == [("app", "sale"), ("other", "step__one")]
    for wrong in ("app:*", "a*:b", "m:f:n", "app:a(arg0)", "app"):
        code, details = refused(lambda wrong=wrong: server.subscribe("*:*", exclude=[wrong]))  # type: ignore[misc]
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(f"exclude: {wrong}: a probe is excluded as provider:name")
