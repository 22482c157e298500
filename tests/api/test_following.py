"""Subscriptions that follow processes, and files that these are expected to map."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stapsdtd.errors import LimitReachedError
from stapsdtd.kernel import procfs
from stapsdtd.model import Object
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import Served, processes, refused
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


@pytest.fixture
def app(server: Served) -> Object:
    found = server.file_object(site("a"))
    server.map(os.getpid(), found)
    return found


def test_engine_that_cannot_follow_any_more_refuses(server: Served, pids: list[int]) -> None:
    server.engine.failures["follow"] = LimitReachedError("subscriptions follow processes 64 times, which is the limit")
    code, details = refused(lambda: follow(server, pids[0]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "subscriptions follow processes 64 times, which is the limit"
    assert server.held() == []
