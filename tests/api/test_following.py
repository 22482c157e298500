"""Subscriptions that follow processes, and files that these are expected to map."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from stapsdtd.errors import LimitReachedError
from stapsdtd.kernel import procfs
from stapsdtd.model import Object
from stapsdtd.runtime.fair_thread import Queue
from stapsdtd.sessions import scoped_processes
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, FakeFollowed, Served, processes, refused
from tests.support import children, wait_for
from tests.unit.samples import site
from tests.unit.test_objects import image


@pytest.fixture
def pids() -> Iterator[list[int]]:
    with processes(2) as found:
        yield list(found)


def follow(server: Served, pid: int, **more: list[str]) -> pb.SubscribeResponse:
    return server.subscribe("*:*", scope=pb.Scope(pids=[pid], follow=True), **more)


def test_processes_to_follow_have_to_be_named(server: Served) -> None:
    code, details = refused(lambda: server.subscribe("*:*", scope=pb.Scope(follow=True)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "scope.follow: scope.pids must name the processes to follow"


def test_expected_files_do_not_go_with_files(server: Served) -> None:
    code, details = refused(lambda: server.subscribe("*:*", files=["/a"], expected_files=["/b"]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "expected_files: probes in other files than files names are not traced"
    code, details = refused(lambda: server.subscribe("*:*", expected_files=["b"]))
    assert details == "expected_files: 'b' is not an absolute path"


def test_expected_files_are_armed_before_they_are_mapped(server: Served, pids: list[int], tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(image(b"one"))
    (tmp_path / "script").write_text("#!/bin/sh")
    other = server.file_object(site("other"))
    server.map(pids[0], other)
    expected = [str(tmp_path / name) for name in ("program", "script", "missing")]
    response = follow(server, pids[0], expected_files=expected)
    # probes in other files are wanted, too
    assert {each.name for each in response.sites} == {"one", "other"}
    assert {each.path: each.reason for each in response.unusable_files} == {
        expected[1]: "not an ELF file",
        expected[2]: "no such file",
    }
    followed = server.engine.followed
    assert followed is not None
    assert followed.processes == {pids[0]}
    scopes = [each.scope for target in server.engine.armed.values() for each in target.sites]
    assert scopes == [frozenset({followed})] * 2


def test_children_that_were_forked_before_are_followed(server: Served) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 1000 & cat; kill $!"], stdin=subprocess.PIPE) as master:
        (child,) = wait_for(lambda: [pid for pid in children(master.pid) if procfs.comm(pid) == b"sleep"], "the child")
        server.map(child, server.file_object(site("a")))
        response = follow(server, master.pid)
        assert [each.name for each in response.sites] == ["a"]
        followed = server.engine.followed
        assert followed is not None
        assert {master.pid, child} <= followed.processes


def test_only_followed_processes_have_an_object_armed(server: Served, pids: list[int]) -> None:
    follow(server, pids[0])
    followed = server.engine.followed
    assert followed is not None
    server.map(pids[1], server.file_object(site("a")))
    server.settle()
    assert not server.engine.armed
    followed.processes.add(pids[1])
    server.map(pids[1], server.file_object(site("b")))
    server.settle()
    (target,) = server.engine.armed.values()
    assert [each.site.name for each in target.sites] == ["b"]


def test_subscription_ends_with_the_last_process_that_is_followed(server: Served, app: Object) -> None:
    del app
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as named:
        answer = follow(server, named.pid)
        call = server.stream(answer.subscription_id)
        server.wait_until_streaming()
        followed = server.engine.followed
        assert followed is not None
        followed.processes.add(os.getpid())
    wait_for(lambda: followed.processes == {os.getpid()}, "the end of the named process")
    assert server.subscriptions.get(answer.subscription_id).end_reason is None
    followed.processes.clear()
    *_, last = call
    assert last.end.reason == pb.End.REASON_PROCESSES_ENDED


STRANGERS = range(1 << 24, (1 << 24) + 4000)
"""No processes, which nobody looks at but the fake engine."""


@pytest.fixture
def adopting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Have thousands of processes adopted, each of which takes some 50 us. The function that is set gets the number."""

    def begin(on_adopted: Callable[[int], object]) -> None:
        adopted = itertools.count(1)

        def adopt(followed: FakeFollowed, pid: int) -> None:
            followed.processes.add(pid)
            on_adopted(next(adopted))
            until = time.thread_time() + 50e-6
            while time.thread_time() < until:
                pass

        monkeypatch.setattr(FakeFollowed, "adopt", adopt)
        monkeypatch.setattr(scoped_processes, "descendants", lambda _: iter([set(STRANGERS)]))

    return begin


def test_others_have_their_turn_while_processes_are_adopted(
    server: Served, pids: list[int], adopting: Callable[[Callable[[int], object]], None]
) -> None:
    found: list[int] = []

    def on_adopted(number: int) -> None:
        followed = server.engine.followed
        assert followed is not None
        if number in {1, 2000}:
            server.arming.submit(Queue("other"), lambda: found.append(len(followed.processes)))

    adopting(on_adopted)
    follow(server, pids[0])
    assert server.engine.followed is not None
    assert server.engine.followed.processes == {pids[0], *STRANGERS}
    # a turn is 3 ms, in which there is room for some 60
    assert found[0] < 1000
    assert 2000 <= found[1] < 3000


def test_nothing_is_adopted_or_armed_behind_the_end_of_a_subscription(
    server: Served, pids: list[int], adopting: Callable[[Callable[[int], object]], None]
) -> None:
    server.map(pids[0], server.file_object(site("a")))
    server.servicer.arm_seconds = 0.05
    begun, goes_on, adopted = threading.Event(), threading.Event(), [0]

    def on_adopted(number: int) -> None:
        adopted[0] = number
        if number == 100:
            begun.set()
            goes_on.wait(PATIENCE_SECONDS)

    adopting(on_adopted)
    response = follow(server, pids[0])
    assert [each.state for each in response.sites] == [pb.SiteStatus.STATE_ARMING]
    assert begun.wait(PATIENCE_SECONDS)
    ending = threading.Thread(target=server.unsubscribe, args=[response.subscription_id])
    ending.start()
    wait_for(lambda: server.arming.backlog().waiting > 1, "the end of the subscription to be due")
    goes_on.set()
    ending.join(PATIENCE_SECONDS)
    assert 100 <= adopted[0] < 1000
    assert server.held() == []
    assert server.engine.armed == {}


@pytest.fixture
def app(server: Served) -> Object:
    found = server.file_object(site("a"))
    server.map(os.getpid(), found)
    return found


def test_engine_that_cannot_follow_any_more_refuses(server: Served, pids: list[int]) -> None:
    text = "subscriptions follow processes 64 times, which is the limit"
    server.engine.failures["follow"] = LimitReachedError(text, "scopes")
    code, details = refused(lambda: follow(server, pids[0]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "subscriptions follow processes 64 times, which is the limit"
    assert server.held() == []
