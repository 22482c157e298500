"""Each call, by clients who try to get more than their role allows, over real connections of different users."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from stapsdtd.api.policy import Policy
from stapsdtd.config import OPERATOR, USER, Limits, Quotas, Role
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.kernel.ownership import owner_of
from stapsdtd.model import Problem
from stapsdtd.v1 import stapsdt_pb2 as pb
from stapsdtd.v1.stapsdt_pb2_grpc import StapsdtServiceStub
from tests.api.served import PATIENCE_SECONDS, FakeHierarchy, Served, processes, refused, served
from tests.support import wait_for
from tests.unit.samples import batch, site
from tests.users import ANNE, BERT, User, public_folder

ADDED, REMOVED, COMPLETE = (
    pb.WatchProbesResponse.CHANGE_ADDED,
    pb.WatchProbesResponse.CHANGE_REMOVED,
    pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE,
)
STAFF = 64110
ANNE_AS_OPERATOR = User(ANNE.uid, (STAFF,))
ROLES = (replace(OPERATOR, groups=(str(STAFF),)), USER)


CONTAINER = "8d0c" * 16


class InterruptedHierarchy(FakeHierarchy):
    """interruption: done once, while a request has a cgroup looked up."""

    def __init__(self) -> None:
        super().__init__(["/", f"/docker/{CONTAINER}"])
        self.interruption: Callable[[], object] | None = None

    def find(self, path: str) -> CgroupInfo | None:
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            interruption()
        return super().find(path)


@pytest.fixture
def hierarchy() -> InterruptedHierarchy:
    return InterruptedHierarchy()


@pytest.fixture
def server(hierarchy: InterruptedHierarchy) -> Iterator[Served]:
    def names_of(ids: Iterable[str]) -> dict[str, str]:
        return dict.fromkeys(ids, "shop")

    with (
        public_folder() as folder,
        served(folder, roles=ROLES, hierarchy=hierarchy, container_names=names_of) as started,
    ):
        yield started


@contextmanager
def sleeping(user: User) -> Iterator[int]:
    """The id of a process that does nothing."""
    with subprocess.Popen(user.command("sleep", "1000")) as child:
        try:
            wait_for(lambda: b"sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes()[:6], "the process to begin")
            assert owner_of(child.pid) == user.uid
            yield child.pid
        finally:
            child.kill()


@pytest.fixture(scope="module")
def pids() -> Iterator[dict[str, int]]:
    with sleeping(ANNE) as anne, sleeping(BERT) as bert, processes(1) as (root,):
        yield {"anne": anne, "bert": bert, "root": root}


Connect = Callable[[User], StapsdtServiceStub]


@pytest.fixture
def connect(server: Served) -> Iterator[Connect]:
    with ExitStack() as channels:

        def connect(user: User) -> StapsdtServiceStub:
            with user.connecting(f"unix:{server.socket}") as door:
                channel = channels.enter_context(grpc.insecure_channel(door))
                stub = StapsdtServiceStub(channel)
                stub.ListSubscriptions(pb.ListSubscriptionsRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True)
            return stub

        yield connect


@pytest.fixture
def anne(connect: Connect) -> StapsdtServiceStub:
    return connect(ANNE)


def subscribe(stub: StapsdtServiceStub, *selectors: str, **more: Any) -> pb.SubscribeResponse:
    request = pb.SubscribeRequest(selectors=selectors or ["app:*"], **more)
    return stub.Subscribe(request, timeout=PATIENCE_SECONDS)


def stream(stub: StapsdtServiceStub, ident: str) -> Any:
    request = pb.StreamRequest(subscription_id=ident, encoding=pb.StreamRequest.ENCODING_ROWS)
    return stub.Stream(request, timeout=PATIENCE_SECONDS)


def held(stub: StapsdtServiceStub) -> list[str]:
    answer = stub.ListSubscriptions(pb.ListSubscriptionsRequest(), timeout=PATIENCE_SECONDS)
    return [each.subscription_id for each in answer.subscriptions]


def apply(server: Served, *roles: Role) -> int:
    """As SIGHUP does."""
    server.gate.policy = Policy(roles)
    return server.in_api(server.servicer.apply_policy())


class TestOthersProcesses:
    @pytest.fixture(autouse=True)
    def _probes(self, server: Served, pids: dict[str, int]) -> None:
        """What Bert was first to map, what Anne maps by another name, and what only Bert and root map."""
        problem = Problem("app", "bad", "no nop at the location")
        shared = server.file_object(site("shared"), problems=[problem])
        (server.folder / "hers").hardlink_to(shared.path)
        theirs = server.file_object(site("theirs"), name="theirs", problems=[problem])
        server.map(pids["bert"], shared)
        server.map(pids["anne"], shared, "hers")
        server.map(pids["bert"], theirs, "theirs")
        server.map(pids["root"], theirs, "theirs")

    def listed(self, stub: StapsdtServiceStub, **request: Any) -> pb.ListProbesResponse:
        return stub.ListProbes(pb.ListProbesRequest(**request), timeout=PATIENCE_SECONDS)

    def test_info(self, server: Served, anne: StapsdtServiceStub) -> None:
        subscribe(server.stub)
        info = anne.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS)
        assert (info.processes, info.objects, info.probes, info.subscriptions) == (1, 1, 1, 0)
        assert info.access == pb.Access(
            client=f"uid {ANNE.uid}", role="user", list=pb.Users(uids=[ANNE.uid]), trace=pb.Users(uids=[ANNE.uid])
        )
        info = server.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS)
        assert (info.processes, info.objects, info.probes, info.subscriptions) == (3, 2, 2, 1)
        everybody = pb.Users(everybody=True)
        assert info.access == pb.Access(
            client="uid 0", role="operator", manage=True, list=everybody, trace=everybody, functions=True
        )

    def test_list(self, server: Served, anne: StapsdtServiceStub, pids: dict[str, int]) -> None:
        answer = self.listed(anne, details=True)
        hers = str(server.folder / "hers")
        assert [(probe.name, probe.path, list(probe.pids)) for probe in answer.probes] == [
            ("shared", hers, [pids["anne"]])
        ]
        assert [process.pid for process in answer.processes] == [pids["anne"]]
        assert [problem.path for problem in answer.problems] == [hers]
        for name in ("bert", "root"):
            assert self.listed(anne, details=True, pids=[pids[name]]) == pb.ListProbesResponse(problems=answer.problems)
        assert not self.listed(anne, selectors=[f"app{pids['bert']}:::"]).probes
        # by the name that it has for Bert alone
        assert not self.listed(anne, selectors=[f":{server.folder / 'app'}::"]).probes
        assert len(self.listed(server.stub).probes) == 2

    def test_process_that_is_hers_no_more_when_it_was_looked_at(
        self, server: Served, anne: StapsdtServiceStub, monkeypatch: pytest.MonkeyPatch, pids: dict[str, int]
    ) -> None:
        """As one whose number another user's process has by then."""
        monkeypatch.setattr("stapsdtd.api.listing.belongs", lambda pid, users: pid not in pids.values() or not users)
        answer = self.listed(anne, details=True)
        assert (len(answer.probes), len(answer.processes)) == (1, 0)
        assert len(self.listed(server.stub, details=True).processes) == 3

    def test_watch(self, server: Served, anne: StapsdtServiceStub, pids: dict[str, int]) -> None:
        call = anne.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS)
        first = next(call)
        assert (first.probe.path, list(first.probe.pids)) == (str(server.folder / "hers"), [pids["anne"]])
        assert next(call).change == COMPLETE
        later = server.file_object(site("later"), name="later")
        server.map(pids["bert"], later, "later")
        server.map(pids["anne"], later, "also")
        found = next(call)
        assert (found.change, found.probe.path, list(found.probe.pids)) == (
            ADDED, str(server.folder / "also"), [pids["anne"]],
        )  # fmt: skip
        server.unmap(pids["anne"], later)
        assert next(call).change == REMOVED

    def test_subscribe(self, server: Served, anne: StapsdtServiceStub, pids: dict[str, int]) -> None:
        answer = subscribe(anne)
        hers = str(server.folder / "hers")
        assert [(status.name, status.path) for status in answer.sites] == [("shared", hers), ("bad", hers)]
        (target,) = server.engine.armed.values()
        assert target.owners == frozenset({ANNE.uid})
        assert not subscribe(anne, f":{server.folder / 'app'}::").sites
        assert not subscribe(anne, f"app{pids['bert']}:::").sites
        later = server.file_object(site("later"), name="later")
        server.map(pids["bert"], later, "later")
        server.map(pids["root"], later, "later")
        assert len(server.engine.armed) == 1

    def test_pids(self, anne: StapsdtServiceStub, pids: dict[str, int]) -> None:
        """The answer is the same whether there is such a process or not."""
        code, told = refused(lambda: subscribe(anne, scope=pb.Scope(pids=[pids["anne"], pids["bert"]])))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert told == (
            f"role user does not allow tracing process {pids['bert']}, only those with the rights of uid "
            f"{ANNE.uid} and no others"
        )
        missing = 1 << 30
        assert refused(lambda: subscribe(anne, scope=pb.Scope(pids=[missing]))) == (
            code, told.replace(str(pids["bert"]), str(missing)),
        )  # fmt: skip
        assert len(subscribe(anne, scope=pb.Scope(pids=[pids["anne"]], exclude_pids=[pids["bert"]])).sites) == 2


class TestContainers:
    """Names that engines keep are root's. Ids are not secret: /sys/fs/cgroup has them."""

    WHOSE = "engines' names of containers are for roles that reach all users' processes"

    def test_are_known_by_name_to_who_reaches_everybody(self, connect: Connect) -> None:
        operator = connect(ANNE_AS_OPERATOR)
        assert subscribe(operator, scope=pb.Scope(containers=["shop"])).subscription_id
        assert not operator.ListProbes(pb.ListProbesRequest(containers=["shop"]), timeout=PATIENCE_SECONDS).probes

    def test_are_known_by_id_to_all(self, anne: StapsdtServiceStub) -> None:
        assert subscribe(anne, scope=pb.Scope(containers=[CONTAINER[:12]])).subscription_id
        for name in ("shop", "none"):
            request = pb.ListProbesRequest(containers=[name])
            for call in (
                partial(subscribe, anne, scope=pb.Scope(containers=[name])),
                partial(anne.ListProbes, request, timeout=PATIENCE_SECONDS),
            ):
                code, told = refused(call)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert told.endswith(f"{name!r}; write at least 12 digits of its id, since {self.WHOSE}")


class TestOthersSubscriptions:
    @pytest.mark.parametrize("whose", [None, BERT, ANNE_AS_OPERATOR], ids=["root's", "Bert's", "with more rights"])
    def test_are_unknown(self, server: Served, connect: Connect, anne: StapsdtServiceStub, whose: User | None) -> None:
        other = server.stub if whose is None else connect(whose)
        ident = subscribe(other).subscription_id
        assert ident not in held(anne)
        unknown = grpc.StatusCode.NOT_FOUND
        for call in (
            lambda ident: next(stream(anne, ident)),
            lambda ident: anne.Unsubscribe(pb.UnsubscribeRequest(subscription_id=ident), timeout=PATIENCE_SECONDS),
        ):
            code, told = refused(lambda: call(ident))  # noqa: B023 - it is called at once
            assert (code, told.replace(ident, "nothing")) == refused(lambda: call("nothing"))  # noqa: B023
            assert code is unknown
        assert ident in held(other)
        # also when it has ended, and is kept for a moment
        other.Unsubscribe(pb.UnsubscribeRequest(subscription_id=ident), timeout=PATIENCE_SECONDS)
        assert refused(lambda: next(stream(anne, ident)))[0] is unknown

    def test_stream_is_not_taken_over(self, server: Served, connect: Connect, anne: StapsdtServiceStub) -> None:
        ident = subscribe(connect(BERT)).subscription_id
        call = stream(connect(BERT), ident)
        server.wait_until_streaming()
        refused(lambda: next(stream(anne, ident)))
        server.fire(batch([1]))
        assert next(call).WhichOneof("payload") == "rows"
        assert server.held()[0].streaming

    def test_another_connection_of_the_same_user_shares_them(self, connect: Connect, anne: StapsdtServiceStub) -> None:
        ident = subscribe(connect(ANNE)).subscription_id
        assert held(anne) == [ident]
        # and one with more rights sees them too
        assert held(connect(ANNE_AS_OPERATOR)) == [ident]

    def test_operators_manage_all(
        self, server: Served, anne: StapsdtServiceStub, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "stapsdtd.access")
        ident = subscribe(anne).subscription_id
        assert held(server.stub) == [ident]
        server.unsubscribe(ident)
        assert not held(anne)
        record = caplog.records[-1]
        assert (record.getMessage(), vars(record)["fields"]["owner"]) == ("unsubscribe allowed", f"uid {ANNE.uid}")


class TestQuotas:
    def test_limits_tell_nothing_of_others(self) -> None:
        limits = Limits(max_subscriptions=2, max_total_queue_bytes=3000, default_queue_bytes=1000)
        with public_folder() as folder, served(folder, limits) as server:
            subscribe(server.stub)
            assert refused(lambda: subscribe(server.stub, queue_bytes=2001)) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "all queues would take more than the 3000 bytes that this server allows",
            )
            subscribe(server.stub)
            assert refused(lambda: subscribe(server.stub)) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED, "there are 2 subscriptions, as many as this server allows"
            )  # fmt: skip

    def test_watches(self, server: Served, anne: StapsdtServiceStub, connect: Connect) -> None:
        few = replace(USER, quotas=Quotas(max_subscriptions=2))
        apply(server, OPERATOR, few)
        calls = [anne.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS) for _ in range(2)]
        assert [next(call).change for call in calls] == [COMPLETE, COMPLETE]
        code, told = refused(lambda: next(anne.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS)))
        assert (code, told) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"uid {ANNE.uid} has 2 watches, as many as its role allows",
        )  # fmt: skip
        assert next(connect(BERT).WatchProbes(pb.WatchProbesRequest())).change == COMPLETE
        calls[0].cancel()

        def watches() -> bool:
            try:
                return next(anne.WatchProbes(pb.WatchProbesRequest())).change == COMPLETE
            except grpc.RpcError:
                return False

        wait_for(watches, "the other one to have ended")

    def test_requests(self, server: Served, anne: StapsdtServiceStub) -> None:
        apply(server, OPERATOR, replace(USER, quotas=Quotas(max_requests_per_second=1)))
        held(anne)
        assert refused(lambda: [held(anne) for _ in range(100)]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"uid {ANNE.uid} makes more than 1 requests a second; try again later",
        )  # fmt: skip

    def test_connections(self, server: Served, anne: StapsdtServiceStub, caplog: pytest.LogCaptureFixture) -> None:
        apply(server, OPERATOR, replace(USER, quotas=Quotas(max_connections=1)))
        held(anne)
        with ANNE.connecting(f"unix:{server.socket}") as door, grpc.insecure_channel(door) as channel:
            code, _ = refused(lambda: held(StapsdtServiceStub(channel)))
        assert code is grpc.StatusCode.UNAVAILABLE
        record = next(each for each in caplog.records if each.getMessage() == "connect refused")
        assert vars(record)["fields"]["client"] == f"uid {ANNE.uid}"
        held(anne)


class TestPolicyChanges:
    NONE = replace(USER, list=("none",), trace=("none",))
    ALL = replace(USER, list=("all",), trace=("all",))

    def test_who_may_list_nothing_is_told_so(self, server: Served, anne: StapsdtServiceStub) -> None:
        apply(server, OPERATOR, replace(USER, list=("none",)))
        told = (grpc.StatusCode.PERMISSION_DENIED, "role user does not allow listing probes")
        assert refused(lambda: anne.ListProbes(pb.ListProbesRequest(), timeout=PATIENCE_SECONDS)) == told
        assert refused(lambda: next(anne.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS))) == told
        info = anne.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS)
        assert (info.processes, info.access.list) == (0, pb.Users())

    def test_subscription_and_stream_end(self, server: Served, anne: StapsdtServiceStub, pids: dict[str, int]) -> None:
        server.map(pids["anne"], server.file_object(site("a")))
        ident = subscribe(anne).subscription_id
        server.fire(batch([1, 2]))
        call = stream(anne, ident)
        server.wait_until_streaming()
        assert apply(server, OPERATOR, self.NONE) == 1
        messages = list(call)
        assert sum(len(message.rows.events) for message in messages) == 2
        assert messages[-1].end.reason == pb.End.REASON_ACCESS_REVOKED
        assert not server.engine.sinks

    def test_slow_client_still_gets_what_had_fired(self, server: Served, anne: StapsdtServiceStub) -> None:
        ident = subscribe(anne).subscription_id
        call = stream(anne, ident)
        server.wait_until_streaming()
        # more than the connection holds
        rows, times = 10_000, 20
        for number in range(times):
            server.fire(batch(range(number * rows, (number + 1) * rows)))
        assert apply(server, OPERATOR, self.NONE) == 1
        messages = list(call)
        assert sum(len(message.rows.events) for message in messages) == rows * times
        assert messages[-1].end.reason == pb.End.REASON_ACCESS_REVOKED

    def test_stream_that_begins_only_then_gets_the_end(
        self, server: Served, anne: StapsdtServiceStub, connect: Connect
    ) -> None:
        ident = subscribe(anne).subscription_id
        server.fire(batch([1, 2]))
        other = connect(User(ANNE.uid, (64111,)))
        assert apply(server, OPERATOR, self.NONE) == 1
        assert refused(lambda: next(stream(other, ident)))[0] is grpc.StatusCode.NOT_FOUND
        end = list(stream(anne, ident))[-1].end
        assert (end.reason, end.account.delivered) == (pb.End.REASON_ACCESS_REVOKED, 2)

    def test_who_has_no_role_any_more_is_told_so(self, server: Served, anne: StapsdtServiceStub) -> None:
        call = stream(anne, subscribe(anne).subscription_id)
        server.wait_until_streaming()
        apply(server, OPERATOR, replace(USER, everybody=False))
        assert list(call)[-1].end.reason == pb.End.REASON_ACCESS_REVOKED
        assert refused(lambda: held(anne)) == (
            grpc.StatusCode.PERMISSION_DENIED, f"no role of this server applies to uid {ANNE.uid}",
        )  # fmt: skip

    @pytest.mark.parametrize("to", [USER, replace(ALL, quotas=Quotas(max_events_per_second=5))])
    def test_who_may_still_goes_on(self, server: Served, anne: StapsdtServiceStub, to: Role) -> None:
        call = stream(anne, subscribe(anne).subscription_id)
        server.wait_until_streaming()
        assert apply(server, OPERATOR, to) == 0
        server.fire(batch([1]))
        assert next(call).WhichOneof("payload") in {"descriptions", "rows"}
        assert server.held()[0].streaming

    def test_manager_loses_streams_of_others(self, server: Served, connect: Connect, anne: StapsdtServiceStub) -> None:
        ident = subscribe(anne).subscription_id
        call = stream(connect(ANNE_AS_OPERATOR), ident)
        other = stream(connect(User(BERT.uid, (STAFF,))), subscribe(anne).subscription_id)
        wait_for(lambda: [each.streaming for each in server.held()] == [True, True], "both streams")
        assert apply(server, OPERATOR, USER) == 0
        code, told = refused(lambda: next(other))
        assert (code, told) == (
            grpc.StatusCode.PERMISSION_DENIED, "the server's policy changed and no longer allows this",
        )  # fmt: skip
        # it is her own, and she may have it with the rights that are left
        assert call.is_active()
        assert ident in held(anne)

    def test_watch_goes_on_with_what_may_be_seen_now(
        self, server: Served, anne: StapsdtServiceStub, pids: dict[str, int]
    ) -> None:
        server.map(pids["bert"], server.file_object(site("his"), name="his"), "his")
        server.map(pids["anne"], server.file_object(site("hers"), name="hers"), "hers")
        call = anne.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS)
        assert [(message.change, message.probe.name) for message in (next(call), next(call))] == [
            (ADDED, "hers"), (COMPLETE, ""),
        ]  # fmt: skip
        apply(server, OPERATOR, self.ALL)
        found = next(call)
        assert (found.change, found.probe.name) == (ADDED, "his")
        server.map(pids["root"], server.file_object(site("roots"), name="roots"), "roots")
        assert next(call).probe.name == "roots"
        apply(server, OPERATOR, USER)
        assert {(message.change, message.probe.name) for message in (next(call), next(call))} == {
            (REMOVED, "his"), (REMOVED, "roots"),
        }  # fmt: skip
        apply(server, OPERATOR, self.NONE)
        assert refused(lambda: next(call))[0] is grpc.StatusCode.PERMISSION_DENIED

    def test_watch_that_was_about_to_begin(
        self, server: Served, anne: StapsdtServiceStub, hierarchy: InterruptedHierarchy
    ) -> None:
        """The policy changes between the question who it is and the watch."""
        hierarchy.interruption = partial(apply, server, OPERATOR, self.NONE)
        call = anne.WatchProbes(pb.WatchProbesRequest(cgroups=["/"]), timeout=PATIENCE_SECONDS)
        assert refused(lambda: list(call))[0] is grpc.StatusCode.PERMISSION_DENIED

    def test_subscription_that_was_about_to_begin(
        self, server: Served, anne: StapsdtServiceStub, hierarchy: InterruptedHierarchy
    ) -> None:
        hierarchy.interruption = partial(apply, server, OPERATOR, self.NONE)
        assert refused(lambda: subscribe(anne, scope=pb.Scope(cgroups=["/"]))) == (
            grpc.StatusCode.PERMISSION_DENIED, "role user does not allow tracing",
        )  # fmt: skip
        assert not server.engine.sinks

    def test_quota_of_a_living_subscription(self, server: Served, anne: StapsdtServiceStub) -> None:
        ident = subscribe(anne).subscription_id
        apply(server, OPERATOR, replace(USER, quotas=Quotas(max_events_per_second=3)))
        server.fire(batch(range(10)))
        account = server.unsubscribe(ident)
        assert (account.fired, account.in_flight, account.lost_quota) == (10, 3, 7)


def test_decisions_are_recorded(
    server: Served, anne: StapsdtServiceStub, caplog: pytest.LogCaptureFixture, pids: dict[str, int]
) -> None:
    caplog.set_level(logging.DEBUG, "stapsdtd.access")
    anne.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE_SECONDS)
    anne.ListProbes(pb.ListProbesRequest(), timeout=PATIENCE_SECONDS)
    held(anne)
    ident = subscribe(anne, "app:*", f"other:{'x' * 300}").subscription_id
    refused(lambda: subscribe(anne, scope=pb.Scope(pids=[pids["bert"]])))
    call = stream(anne, ident)
    server.wait_until_streaming()
    anne.Unsubscribe(pb.UnsubscribeRequest(subscription_id=ident), timeout=PATIENCE_SECONDS)
    list(call)
    next(anne.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS))
    roots = subscribe(server.stub).subscription_id
    refused(lambda: next(stream(anne, roots)))
    hers = [
        (record.levelname, record.getMessage(), vars(record)["fields"])
        for record in caplog.records
        if record.name == "stapsdtd.access" and vars(record)["fields"]["client"] == f"uid {ANNE.uid}"
    ]
    assert [(level, message) for level, message, _ in hers] == [
        ("DEBUG", "info allowed"),
        ("DEBUG", "list allowed"),
        ("DEBUG", "subscriptions allowed"),
        ("INFO", "subscribe allowed"),
        ("WARNING", "subscribe refused"),
        ("INFO", "stream allowed"),
        ("INFO", "unsubscribe allowed"),
        ("INFO", "watch allowed"),
        ("WARNING", "stream refused"),
    ]
    assert all(fields["role"] == "user" and fields["pid"] for _, _, fields in hers)
    assert hers[3][2]["subscription"] == ident
    assert len(hers[3][2]["selectors"]) == 200
    assert f"process {pids['bert']}" in str(hers[4][2]["reason"])
    assert (hers[8][2]["subscription"], hers[8][2]["owner"]) == (roots, "uid 0")
