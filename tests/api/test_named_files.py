"""Files that requests name: armed before a process maps them, and listed without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stapsdtd.config import Listener, Role
from stapsdtd.model import FileOffset, Mapping, Object, ObjectKey, ProcessKey
from stapsdtd.sessions.admission import FileLimits
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.api.served import PATIENCE_SECONDS, Served, processes, refused, served
from tests.support import held_port, wait_for
from tests.unit.test_objects import image, parse_here

ARMED, DISARMED = pb.SiteStatus.STATE_ARMED, pb.SiteStatus.STATE_DISARMED


@pytest.fixture
def pid() -> Iterator[int]:
    with processes(1) as (found,):
        yield found


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in (b"one", b"two"):
        (folder / name.decode()).write_bytes(image(name))
    return folder


def object_at(path: Path) -> Object:
    status = path.stat()
    key = ObjectKey(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    with open(path, "rb") as file:
        return Object(key, str(path), parse_here(file.fileno(), os.getpid()))


def run(server: Served, pid: int, path: Path) -> None:
    """Have a process map a file."""
    found = object_at(path)
    mapping = Mapping(0x1000, 0x2000, FileOffset(0), found.key.dev, found.key.inode, str(path))
    server.in_control(lambda: server.registry.update(ProcessKey(pid, 1), {found.key: (found, mapping)}))


def end(server: Served, pid: int) -> None:
    server.in_control(lambda: server.registry.gone(pid))


def listed(server: Served, **more: object) -> list[tuple[str, str, list[int]]]:
    response = server.stub.ListProbes(pb.ListProbesRequest(**more), timeout=PATIENCE_SECONDS)  # type: ignore[arg-type]
    return [(probe.name, probe.path, list(probe.pids)) for probe in response.probes]


def armed_paths(server: Served) -> list[str]:
    server.settle()
    return sorted(target.object.path for target in server.engine.armed.values())


def test_files_are_armed_before_a_process_maps_them(server: Served, pid: int, programs: Path) -> None:
    response = server.subscribe("*:*", files=[str(programs)])
    assert [(each.name, each.path, each.state) for each in response.sites] == [
        ("one", str(programs / "one"), ARMED),
        ("two", str(programs / "two"), ARMED),
    ]
    # others' lists have what processes map
    assert listed(server) == []
    run(server, pid, programs / "one")
    assert listed(server) == [("one", str(programs / "one"), [pid])]
    assert server.engine.calls.count("arm") == 2
    end(server, pid)
    assert armed_paths(server) == [str(programs / "one"), str(programs / "two")]
    assert "disarm" not in server.engine.calls
    server.unsubscribe(response.subscription_id)
    assert armed_paths(server) == []
    assert server.in_control(server.registry.objects) == []


def test_the_end_does_not_wait_for_files_that_nobody_maps(server: Served, pid: int, programs: Path) -> None:
    """They are disarmed by themselves, before the subscription is closed, whose sites are waited for."""
    response = server.subscribe("*:*", files=[str(programs)])
    run(server, pid, programs / "one")
    server.unsubscribe(response.subscription_id)
    calls = [call for call in server.engine.calls if call in {"disarm", "close"}]
    assert calls == ["disarm", "close"]


def test_only_the_named_files_are_meant(server: Served, pid: int, programs: Path) -> None:
    server.subscribe("*:*", files=[str(programs / "two")])
    run(server, pid, programs / "one")
    assert armed_paths(server) == [str(programs / "two")]
    server.subscribe("*:one", files=[str(programs / "o*")])
    assert armed_paths(server) == [str(programs / "one"), str(programs / "two")]


def test_selectors_choose_among_the_files(server: Served, programs: Path) -> None:
    request = {"files": [str(programs)], "require_match": True}
    assert [each.name for each in server.subscribe("one:*:*", **request).sites] == ["one"]
    assert refused(lambda: server.subscribe("*:three", **request)) == (grpc.StatusCode.NOT_FOUND, "no probe matches")
    assert len(server.held()) == 1
    server.settle()
    assert len(server.in_control(server.registry.objects)) == 2


def test_probes_of_one_process_are_armed_before_it_maps_them(server: Served, pid: int, programs: Path) -> None:
    server.subscribe(f"*{pid}:::one", files=[str(programs)])
    (target,) = server.engine.armed.values()
    assert (target.object.path, [each.scope for each in target.sites]) == (str(programs / "one"), [frozenset([pid])])


def test_scope_of_pids_waits_for_its_processes(server: Served, pid: int, programs: Path) -> None:
    server.subscribe("*:*", files=[str(programs)], scope=pb.Scope(pids=[pid]))
    assert armed_paths(server) == []
    run(server, pid, programs / "two")
    assert armed_paths(server) == [str(programs / "two")]


@pytest.mark.parametrize("named", ["one", ""], ids=["file", "directory"])
def test_file_that_takes_the_place_of_one_is_armed_when_it_is_mapped(
    server: Served, pid: int, programs: Path, named: str
) -> None:
    server.subscribe("*:one", "*:new", files=[str(programs / named)])
    (programs / "later").write_bytes(image(b"new"))
    (programs / "later").rename(programs / "one")
    run(server, pid, programs / "one")
    server.in_control(server.subscriptions.housekeeping.clean_up)
    targets = [target.object for target in server.engine.armed.values()]
    assert [site.name for found in targets for site in found.parsed.sites] == ["new"]
    assert [found.key for found in server.in_control(server.registry.objects)][-1] == object_at(programs / "one").key


def test_deleted_file_is_let_go(server: Served, programs: Path) -> None:
    server.subscribe("*:*", files=[str(programs)])
    (programs / "one").unlink()

    def armed_after_a_look() -> list[str]:
        server.in_control(server.subscriptions.housekeeping.clean_up)
        return armed_paths(server)

    # the kernel may not know at once that the path leads nowhere
    wait_for(lambda: armed_after_a_look() == [str(programs / "two")], "the file to be disarmed")
    assert [each.path for each in server.in_control(server.registry.objects)] == [str(programs / "two")]


def test_content_written_since_is_not_armed_by_the_old_notes(server: Served, pid: int, programs: Path) -> None:
    server.subscribe("*:*", files=[str(programs / "one")])
    before = object_at(programs / "one").key
    (programs / "one").write_bytes(image(b"new", b"newer"))
    run(server, pid, programs / "one")
    assert [key for _, key in server.engine.armed] == [object_at(programs / "one").key]
    # what the client named comes after what a process maps
    live = next(iter(server.subscriptions._live.values()))
    named = next(each for each in server.in_control(server.registry.objects) if each.key == before)
    server.in_control(lambda: server.subscriptions.arming.follower.consider(live, named))
    assert [key for _, key in server.engine.armed] == [object_at(programs / "one").key]


def test_list_of_files(server: Served, pid: int, programs: Path) -> None:
    one, two = programs / "one", programs / "two"
    assert listed(server, files=[str(programs)]) == [("one", str(one), []), ("two", str(two), [])]
    run(server, pid, one)
    (programs / "link").symlink_to("one")
    assert listed(server, files=[str(programs / "link")]) == [("one", str(one), [pid])]
    assert listed(server, files=[str(programs)], pids=[pid]) == [("one", str(one), [pid])]
    assert listed(server, files=[str(programs)], selectors=["*:two"]) == [("two", str(two), [])]
    assert [each.path for each in server.in_control(server.registry.objects)] == [str(one)]


@pytest.mark.parametrize(
    ("files", "code", "details"),
    [
        (["bin/sh"], grpc.StatusCode.INVALID_ARGUMENT, "files: 'bin/sh' is not an absolute path"),
        (["/a\0b"], grpc.StatusCode.INVALID_ARGUMENT, "files: '/a\\x00b' cannot be a path"),
        (["/a"] * 1001, grpc.StatusCode.INVALID_ARGUMENT, "files: there are 1001 paths, more than the 1000 allowed"),
        (["/none"], grpc.StatusCode.FAILED_PRECONDITION, "/none: no such file"),
        (["/dev/null"], grpc.StatusCode.FAILED_PRECONDITION, "/dev/null: not a regular file"),
    ],
)
def test_refusals(server: Served, files: list[str], code: grpc.StatusCode, details: str) -> None:
    assert refused(lambda: server.subscribe("*:*", files=files)) == (code, details)
    assert refused(lambda: listed(server, files=files)) == (code, details)
    assert server.held() == []


@pytest.mark.parametrize("role", ["everybody", "roots"])
def test_client_that_is_no_user_needs_a_role_that_lists_everybodys(tmp_path: Path, programs: Path, role: str) -> None:
    roles = [Role("everybody", list=("all",), trace=("all",)), Role("roots", list=("root",), trace=("all",))]
    request = pb.ListProbesRequest(files=[str(programs)])
    with (
        held_port() as port,
        served(tmp_path, roles=roles, listeners=[Listener(f"tcp:127.0.0.1:{port}", role=role)]),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = StapsdtServiceStub(channel)
        if role == "everybody":
            assert len(stub.ListProbes(request, timeout=PATIENCE_SECONDS).probes) == 2
            return
        code, details = refused(lambda: stub.ListProbes(request, timeout=PATIENCE_SECONDS))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "role roots does not allow naming files" in details


def test_subscriptions_of_a_client_name_so_many_files(tmp_path: Path, programs: Path) -> None:
    with served(tmp_path, file_limits=FileLimits(files_per_client=3)) as server:
        first = server.subscribe("*:*", files=[str(programs)])
        code, details = refused(lambda: server.subscribe("*:*", files=[str(programs)]))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details == "your subscriptions would name more than 3 files"
        server.unsubscribe(first.subscription_id)
        assert len(server.subscribe("*:*", files=[str(programs)]).sites) == 2
