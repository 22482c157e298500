"""Installed files: armed before a process maps them, and listed without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from stapsdtd.client import Client
from stapsdtd.config import USER, Listener, Role
from stapsdtd.inventory.files import Change
from stapsdtd.inventory.inventory import InventoryState
from stapsdtd.sessions.installed import InstalledLimits
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.api.served import PATIENCE_SECONDS, FakeInventory, Served, processes, refused, served
from tests.api.test_named_files import armed_paths, end, listed, object_at, run
from tests.support import held_port, wait_for
from tests.unit.samples import batch
from tests.unit.test_objects import image

ARMED = pb.SiteStatus.STATE_ARMED
NOBODY = 65534
OWN = Role("own", users=("root",), list=("nobody",), trace=("nobody",))
"""Of root's connection, so that nobody's processes are its own, and root's are others'."""


@pytest.fixture
def inventory() -> FakeInventory:
    return FakeInventory()


@pytest.fixture
def server(tmp_path: Path, inventory: FakeInventory) -> Iterator[Served]:
    with served(tmp_path, inventory=inventory) as started:
        yield started


@pytest.fixture
def restricted(tmp_path: Path, inventory: FakeInventory) -> Iterator[Served]:
    with served(tmp_path, roles=(OWN, USER), inventory=inventory) as started:
        yield started


@pytest.fixture
def installed(tmp_path: Path, inventory: FakeInventory) -> list[Path]:
    """Two files, each with a probe of its name."""
    return [install(inventory, tmp_path / name) for name in ("one", "two")]


def install(inventory: FakeInventory, path: Path) -> Path:
    path.write_bytes(image(path.name.encode()))
    inventory.install(object_at(path))
    return path


def first_status(server: Served, response: pb.SubscribeResponse) -> list[tuple[str, int]]:
    """The first that the stream carries."""
    call = server.stream(response.subscription_id)
    try:
        return [(each.name, each.state) for each in next(call).status.sites]
    finally:
        call.cancel()


def id_of(server: Served, name: str) -> int:
    """Return the id of a site in the only subscription."""
    targets = server.engine.armed.values()
    return next(each.site_id for target in targets for each in target.sites if each.site.name == name)


def states(response: pb.SubscribeResponse) -> list[tuple[str, str, int]]:
    return [(each.name, each.path, each.state) for each in response.sites]


@pytest.fixture
def own_pid() -> Iterator[int]:
    with processes(1, user=NOBODY) as (pid,):
        yield pid


@pytest.fixture
def foreign_pid() -> Iterator[int]:
    with processes(1) as (pid,):
        yield pid


def test_subscribe_arms_what_is_installed(server: Served, installed: list[Path], foreign_pid: int) -> None:
    one, _ = installed
    response = server.subscribe("*:one", require_match=True)
    assert states(response) == [("one", str(one), ARMED)]
    assert listed(server) == []
    run(server, foreign_pid, one)
    end(server, foreign_pid)
    assert server.engine.calls.count("arm") == 1
    assert armed_paths(server) == [str(one)]
    server.unsubscribe(response.subscription_id)
    assert armed_paths(server) == []
    assert server.in_control(server.registry.objects) == []


@pytest.mark.usefixtures("installed")
def test_probes_of_one_process_wait_until_it_maps_them(server: Served, own_pid: int) -> None:
    server.subscribe(f"*{own_pid}:::one")
    assert armed_paths(server) == []


def test_what_is_installed_later_is_armed_too(server: Served, inventory: FakeInventory, tmp_path: Path) -> None:
    server.subscribe("*:three")
    path = install(inventory, tmp_path / "three")
    wait_for(lambda: armed_paths(server) == [str(path)], "the new file to be armed")


def test_what_is_removed_is_let_go(server: Served, inventory: FakeInventory, installed: list[Path]) -> None:
    server.subscribe("*:one")
    found = object_at(installed[0])
    installed[0].unlink()
    inventory.remove(found)
    wait_for(lambda: armed_paths(server) == [], "the removed file to be disarmed")
    assert server.in_control(server.registry.objects) == []


def test_new_version_takes_the_place_of_the_old(
    server: Served, inventory: FakeInventory, installed: list[Path]
) -> None:
    server.subscribe("*:one")
    (old,), path = [each for each in inventory.files() if each.path == str(installed[0])], installed[0]
    part = path.with_name("part")
    part.write_bytes(image(b"one") + b"\0")
    part.rename(path)
    inventory.install(object_at(path))
    wait_for(lambda: armed_paths(server) == [str(path)] * 2, "the new version to be armed")
    inventory.on_change(Change(removed=(old,)))
    wait_for(lambda: armed_paths(server) == [str(path)], "the old version to be disarmed")
    (target,) = server.engine.armed.values()
    assert target.object.key == object_at(path).key


@pytest.mark.usefixtures("installed")
def test_processes_of_a_scope_map_what_they_need_already(server: Served, foreign_pid: int) -> None:
    server.subscribe("*:one", scope=pb.Scope(pids=[foreign_pid]))
    assert armed_paths(server) == []


def test_processes_that_are_followed_may_execute_what_is_installed(
    server: Served, installed: list[Path], foreign_pid: int, own_pid: int
) -> None:
    one, _ = installed
    # whom somebody else runs is armed for those that are followed
    run(server, own_pid, one)
    response = server.subscribe("*:one", scope=pb.Scope(pids=[foreign_pid], follow=True), require_match=True)
    assert states(response) == [("one", str(one), ARMED)]
    (target,) = server.engine.armed.values()
    assert [each.scope for each in target.sites] == [frozenset({server.engine.followed})]


def test_named_files_restrict_to_themselves(server: Served, installed: list[Path]) -> None:
    server.subscribe("*:one", files=[str(installed[1])])
    assert armed_paths(server) == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("selectors", [["*:*"], ["*"], ["*:*", ":"]])
def test_all_probes_are_those_of_running_programs(server: Served, selectors: list[str]) -> None:
    server.subscribe(*selectors)
    assert armed_paths(server) == []


def test_path_that_leads_elsewhere_is_left_alone(server: Served, installed: list[Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    installed[0].rename(secret)
    installed[0].symlink_to(secret)
    assert states(server.subscribe("*:one", "*:two")) == [("two", str(installed[1]), ARMED)]


def test_files_that_cannot_be_used_do_not_fail_others(server: Served, installed: list[Path]) -> None:
    installed[0].unlink()
    os.mkfifo(installed[0])
    assert states(server.subscribe("*:one", "*:two")) == [("two", str(installed[1]), ARMED)]


@pytest.mark.parametrize(
    "limits",
    [InstalledLimits(files=1), InstalledLimits(sites=1), InstalledLimits(all_files=1)],
    ids=["files", "sites", "all"],
)
def test_what_is_beyond_the_bounds_waits_for_a_process(
    tmp_path: Path,
    *,
    inventory: FakeInventory,
    installed: list[Path],
    foreign_pid: int,
    limits: InstalledLimits,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with served(tmp_path, inventory=inventory, installed_limits=limits) as server:
        response = server.subscribe("*:one", "*:two")
        assert states(response) == [("one", str(installed[0]), ARMED)]
        assert "matches more installed files than may be armed for it" in caplog.text
        run(server, foreign_pid, installed[1])
        assert armed_paths(server) == [*map(str, installed)]


def test_quota_bounds_the_sites(tmp_path: Path, inventory: FakeInventory, installed: list[Path]) -> None:
    role = replace(USER, users=("root",), list=("all",), trace=("all",), quotas=replace(USER.quotas, max_sites=1))
    with served(tmp_path, roles=(role,), inventory=inventory) as server:
        response = server.subscribe("*:one", "*:two")
        assert states(response) == [("one", str(installed[0]), ARMED)]


class TestOrdinaryUser:
    def test_hears_of_nothing_before_a_process_of_his_maps_it(
        self, restricted: Served, installed: list[Path], own_pid: int
    ) -> None:
        response = restricted.subscribe("*:one")
        assert states(response) == []
        assert armed_paths(restricted) == [str(installed[0])]
        run(restricted, own_pid, installed[0])
        assert first_status(restricted, response) == [("one", ARMED)]
        assert restricted.engine.calls.count("arm") == 1
        assert restricted.unsubscribe(response.subscription_id).sites == 1

    def test_never_has_a_file_patched_that_only_others_run(
        self, restricted: Served, installed: list[Path], own_pid: int, foreign_pid: int
    ) -> None:
        run(restricted, foreign_pid, installed[0])
        response = restricted.subscribe("*:one")
        assert armed_paths(restricted) == []
        end(restricted, foreign_pid)
        assert armed_paths(restricted) == [str(installed[0])]
        run(restricted, foreign_pid, installed[0])
        assert armed_paths(restricted) == []
        # of all that, the client hears nothing
        run(restricted, own_pid, installed[0])
        assert armed_paths(restricted) == [str(installed[0])]
        assert first_status(restricted, response) == [("one", ARMED)]

    @pytest.mark.usefixtures("installed")
    def test_hears_of_a_file_by_the_hits_of_a_process_that_nobody_saw(self, restricted: Served) -> None:
        """It ran for less time than a scan of /proc takes."""
        response = restricted.subscribe("*:one", "*:two")
        assert states(response) == []
        restricted.fire(batch([1, 2], site_id=id_of(restricted, "one")))
        restricted.in_control(restricted.subscriptions.housekeeping.check_progress)
        assert first_status(restricted, response) == [("one", ARMED)]
        account = restricted.unsubscribe(response.subscription_id)
        assert (account.sites, account.fired) == (1, 2)

    @pytest.mark.usefixtures("installed")
    def test_hears_of_a_file_by_its_last_hits(self, restricted: Served) -> None:
        response = restricted.subscribe("*:one", "*:two")
        restricted.engine.last_events = [batch([1, 2], site_id=id_of(restricted, "one"))]
        account = restricted.unsubscribe(response.subscription_id)
        told = [each.name for message in restricted.stream(response.subscription_id) for each in message.status.sites]
        assert (account.sites, account.fired, told) == (1, 2, ["one"])

    def test_hears_nothing_of_files_of_which_it_has_no_hits(self, restricted: Served, installed: list[Path]) -> None:
        response = restricted.subscribe("*:one")
        assert armed_paths(restricted) == [str(installed[0])]
        restricted.in_control(restricted.subscriptions.housekeeping.check_progress)
        assert restricted.unsubscribe(response.subscription_id).sites == 0

    def test_refusals_are_told_when_a_process_maps_it(
        self, restricted: Served, installed: list[Path], own_pid: int
    ) -> None:
        restricted.engine.refuse = {"one": "no"}
        response = restricted.subscribe("*:one", all_or_nothing=True)
        run(restricted, own_pid, installed[0])
        assert first_status(restricted, response) == [("one", pb.SiteStatus.STATE_REFUSED)]

    @pytest.mark.usefixtures("installed")
    def test_is_nobody_without_a_user(self, tmp_path: Path, inventory: FakeInventory) -> None:
        role = Role("monitor", list=("nobody",), trace=("nobody",))
        with held_port() as port, ExitStack() as opened:
            listener = Listener(f"tcp:127.0.0.1:{port}", role="monitor", plain=True)
            server = opened.enter_context(served(tmp_path, roles=(role,), listeners=[listener], inventory=inventory))
            stub = StapsdtServiceStub(opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))
            stub.Subscribe(pb.SubscribeRequest(selectors=["*:one"]), timeout=PATIENCE_SECONDS)
            assert armed_paths(server) == []
            request = pb.ListProbesRequest(installed=True)
            code, text = refused(lambda: stub.ListProbes(request, timeout=PATIENCE_SECONDS))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "no user whose right to read them could be checked" in text


class TestListing:
    def test_has_files_that_no_process_maps(self, server: Served, installed: list[Path], foreign_pid: int) -> None:
        one, two = map(str, installed)
        run(server, foreign_pid, installed[1])
        assert listed(server, installed=True) == [("one", one, []), ("two", two, [foreign_pid])]
        assert listed(server, installed=True, selectors=["*:two"]) == [("two", two, [foreign_pid])]
        assert listed(server, installed=True, selectors=["*:none"]) == []
        assert listed(server) == [("two", two, [foreign_pid])]

    def test_needs_an_inventory(self, tmp_path: Path) -> None:
        with served(tmp_path, inventory=FakeInventory(is_on=False)) as server:
            code, text = refused(lambda: listed(server, installed=True))
            assert (code, text.partition(";")[0]) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "this server keeps no inventory of installed files",
            )

    def test_is_of_named_files_or_of_installed_ones(self, server: Served) -> None:
        code, text = refused(lambda: listed(server, installed=True, files=["/usr/bin/true"]))
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "files: cannot be combined with installed")


@pytest.mark.usefixtures("installed")
def test_info_tells_of_the_inventory(server: Served, inventory: FakeInventory) -> None:
    inventory.status = replace(inventory.status, scanned_at=1_700_000_000.5)
    found = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS).inventory
    assert found == pb.Inventory(
        state=pb.Inventory.STATE_CURRENT, files=2, probes=2, scanned_ns=1_700_000_000_500_000_000
    )


@pytest.mark.parametrize("state", list(InventoryState))
def test_every_state_can_be_told(server: Served, inventory: FakeInventory, state: InventoryState) -> None:
    inventory.status = replace(inventory.status, state=state)
    with Client(f"unix:{server.socket}") as client:
        told = client.info().inventory
    assert told is not None
    assert told.state.value == state.value
