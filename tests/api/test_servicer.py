"""The daemon's API but for Stream: what is asked, what is armed for it, what a wrong request is told."""

from __future__ import annotations

import errno
import gc
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from stapsdtd import __version__
from stapsdtd.api.server import SERVICE
from stapsdtd.api.stream import SubscriptionStream
from stapsdtd.config import Limits
from stapsdtd.errors import KernelFeatureError, TracefsRejectedError
from stapsdtd.kernel import cgroups
from stapsdtd.kernel.host_calls import ARM
from stapsdtd.model import MAX_PROBLEMS, Capture, Constant, Memory, Problem, Unavailable
from stapsdtd.query.expression import And, ArgumentValue, Cgroup, Comparison, Field, Operator, Or
from stapsdtd.runtime.mailbox import ThreadEndedError
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, FakeHierarchy, Served, processes, served
from tests.support import wait_for
from tests.unit.samples import argument, site

ARMED, DISARMED, REFUSED = (pb.SiteStatus.STATE_ARMED, pb.SiteStatus.STATE_DISARMED, pb.SiteStatus.STATE_REFUSED)
ROWS = pb.StreamRequest.ENCODING_ROWS
LIMITS = Limits(
    max_selectors=2, max_lease_seconds=60, max_queue_bytes=1 << 20, max_kernel_buffer_kib=64, max_subscriptions=2
)
REJECTED = TracefsRejectedError("uprobe_events", "p:g/e", 22, "Probe point is not an instruction boundary")


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(2) as started:
        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, LIMITS) as started:
        yield started


def states(statuses: Any) -> list[tuple[str, int, str]]:
    return [(status.name, status.state, status.reason) for status in statuses]


def test_server_info(server: Served, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("a"), site("b", 2), site("b", 3)))
    server.subscribe()
    info = server.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.version, info.engine, info.pid) == (__version__, "fake", os.getpid())
    assert (info.kernel_release, info.machine) == (platform.release(), platform.machine())
    assert (info.subscriptions, info.processes, info.objects, info.probes) == (1, 1, 1, 2)
    assert [(each.name, each.available, each.detail, each.remedy) for each in info.features] == [
        ("uprobes", True, "tried", ""), ("map_files", False, "refused", "be root"),
    ]  # fmt: skip
    assert (info.limits.max_selectors, info.limits.max_queue_bytes, info.limits.max_string_bytes) == (2, 1 << 20, 4096)


class TestListProbes:
    @pytest.fixture(autouse=True)
    def _probes(self, server: Served, pids: list[int]) -> None:
        arguments = [
            argument(text="8@%rdi"), argument(Memory("rbp", -4), 4, signed=True, text="-4@-4(%rbp)"),
            argument(Constant((1 << 64) - 1), text="8@$-1"), argument(Unavailable("no way"), text="16@%xmm0"),
        ]  # fmt: skip
        problem = Problem("app", "bad", "no nop at the location")
        found = server.file_object(
            site("start", 0x10, arguments, semaphore=0x20, function="main"), site("stop"), problems=[problem]
        )
        server.map(pids[0], found)
        server.map(pids[1], found)
        server.map(pids[1], server.file_object(site(provider="library"), name="library"), "library")

    def probes(self, server: Served, **request: Any) -> pb.ListProbesResponse:
        return server.stub.ListProbes(pb.ListProbesRequest(**request), timeout=PATIENCE_SECONDS)

    def test_all(self, server: Served, pids: list[int]) -> None:
        probes = self.probes(server).probes
        assert [(probe.provider, probe.name, list(probe.pids)) for probe in probes] == [
            ("app", "start", sorted(pids)), ("app", "stop", sorted(pids)), ("library", "tick", [pids[1]]),
        ]  # fmt: skip
        first = probes[0]
        assert (first.path, first.build_id, first.architecture) == (str(server.folder / "app"), "c0ffee", "x86-64")
        (found,) = first.sites
        assert (found.site_id, found.offset, found.semaphore_offset, found.function) == (0, 0x10, 0x20, "main")
        assert not probes[1].sites[0].HasField("semaphore_offset")
        assert [each.WhichOneof("operand") for each in found.arguments] == [
            "register", "memory", "constant", "unavailable",
        ]  # fmt: skip
        assert found.arguments[1] == pb.Argument(
            text="-4@-4(%rbp)", size=4, signed=True, memory=pb.MemoryOperand(base="rbp", displacement=-4)
        )
        assert found.arguments[2].constant == -1
        assert found.arguments[3].unavailable == "no way"

    def test_by_selector_and_process(self, server: Served, pids: list[int]) -> None:
        def names(**request: Any) -> list[str]:
            return [probe.name for probe in self.probes(server, **request).probes]

        assert names(selectors=["app:st?p"]) == ["stop"]
        assert names(selectors=["app::main:", "library:"]) == ["start", "tick"]
        assert names(pids=[pids[0]]) == ["start", "stop"]
        assert names(selectors=[f"library{pids[1]}:::"]) == ["tick"]
        assert names(selectors=[f"library{pids[0]}:::"]) == []

    def test_details(self, server: Served, pids: list[int]) -> None:
        assert not self.probes(server).processes
        assert not self.probes(server).problems
        response = self.probes(server, details=True, pids=[pids[0]])
        assert {process.pid for process in response.processes} == set(pids)
        assert response.processes[0].comm == "sleep"
        assert list(response.processes[0].command_line) == ["sleep", "1000"]
        assert response.processes[0].started_ns > 10**18
        assert response.processes[0].namespace_pid == response.processes[0].pid
        assert [(each.path, each.provider, each.name, each.reason) for each in response.problems] == [
            (str(server.folder / "app"), "app", "bad", "no nop at the location")
        ]

    def test_unusable_notes(self, server: Served) -> None:
        def names(*selectors: str) -> list[str]:
            answer = self.probes(server, problems=True, selectors=selectors)
            assert not answer.processes
            return [each.name for each in answer.problems]

        assert names() == names("app:bad") == names("*:b*", "x:y") == names("bad") == ["bad"]
        assert names("app:start") == names("library:*") == names("app:other::bad") == []

    def test_of_many_unusable_notes_some_are_told(self, server: Served, pids: list[int]) -> None:
        for number in range(MAX_PROBLEMS // 10 + 2):
            some = [Problem("odd", f"bad{each}", "no nop at the location") for each in range(MAX_PROBLEMS)]
            found = server.file_object(name=f"odd{number}", problems=some)
            server.map(pids[0], replace(found, parsed=replace(found.parsed, problems_left_out=7)), f"odd{number}")
        answer = self.probes(server, problems=True, selectors=["odd:*"])
        assert (len(answer.problems), answer.problems_left_out) == (1000, 200 + 7 * 12)


class TestWatchProbes:
    ADDED, REMOVED, COMPLETE = (
        pb.WatchProbesResponse.CHANGE_ADDED,
        pb.WatchProbesResponse.CHANGE_REMOVED,
        pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE,
    )

    def watch(self, server: Served, **request: Any) -> Any:
        return server.stub.WatchProbes(pb.WatchProbesRequest(**request), timeout=PATIENCE_SECONDS)

    def next(self, call: Any, count: int) -> list[tuple[int, str]]:
        return [(message.change, message.probe.name) for message in (next(call) for _ in range(count))]

    def test_snapshot_then_what_comes_and_goes(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"), site("b", 2))
        later = server.file_object(site("c"), name="later")
        server.map(pids[0], found)
        call = self.watch(server)
        assert self.next(call, 3) == [(self.ADDED, "a"), (self.ADDED, "b"), (self.COMPLETE, "")]
        server.map(pids[0], later, "later")
        server.map(pids[1], later, "later")
        server.unmap(pids[0], found)
        server.unmap(pids[0], later)
        server.unmap(pids[1], later)
        assert self.next(call, 4) == [
            (self.ADDED, "c"), (self.REMOVED, "a"), (self.REMOVED, "b"), (self.REMOVED, "c"),
        ]  # fmt: skip
        call.cancel()

    def test_only_what_was_selected(self, server: Served, pids: list[int]) -> None:
        call = self.watch(server, selectors=["app:b"], pids=[pids[1]])
        assert self.next(call, 1) == [(self.COMPLETE, "")]
        found = server.file_object(site("a"), site("b", 2))
        server.map(pids[0], found)
        server.map(pids[1], found)
        assert self.next(call, 1) == [(self.ADDED, "b")]
        call.cancel()

    def test_client_that_goes_is_forgotten(self, server: Served) -> None:
        before = server.registry.listening
        call = self.watch(server)
        assert self.next(call, 1) == [(self.COMPLETE, "")]
        assert server.registry.listening == before + 1
        call.cancel()
        wait_for(lambda: server.registry.listening == before, "the watch to end")

    def test_server_that_stops_ends_it_at_once(self, tmp_path: Path) -> None:
        with served(tmp_path) as server:
            call = self.watch(server)
            assert self.next(call, 1) == [(self.COMPLETE, "")]
            server.close_all()
            code, text = refused_with(server.subscribe)
            assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the server is stopping")
            server.in_api(server.servicer.stop())
            assert refused_with(lambda: call) == (grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    def test_stop_waits_for_what_a_cancelled_call_does_lastly(self, server: Served) -> None:
        before = server.registry.listening
        call = self.watch(server)
        assert self.next(call, 1) == [(self.COMPLETE, "")]
        finished = server.begin_in_api(server.servicer.finished())
        with server.control_held():
            asked = server.control.asked
            call.cancel()
            wait_for(lambda: server.control.asked > asked, "the cancellation")
            assert not finished.done()
            assert server.registry.listening == before + 1
        finished.result(PATIENCE_SECONDS)
        assert server.registry.listening == before


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        (pb.SubscribeRequest(), "selectors", "at least one"),
        (pb.SubscribeRequest(selectors=["a:b"] * 3), "selectors", "more than the 2 allowed"),
        (pb.SubscribeRequest(selectors=["a:b", "a:b(c)"]), "selectors[1]", r"'c' is not a capture.*\(column 5\)"),
        (pb.SubscribeRequest(selectors=["a("]), "selectors[0]", r"closing parenthesis.*\(column 3\)"),
        (pb.SubscribeRequest(selectors=["a:" + "b" * 1023]), "selectors[0]", "limited to 1024"),
        (pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(pids=[1, 0])), "scope.pids[1]", "0 is not a process id"),
        (pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(pids=[1] * 4097)), "scope.pids", "4097, more"),
        (
            pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(exclude_pids=[-1])),
            "scope.exclude_pids[0]",
            "-1 is no",
        ),
        (
            pb.SubscribeRequest(selectors=["a:b"], where="arg0 > "),
            "where",
            r"unexpected end; expected a name.*\(column 8\)",
        ),
        (
            pb.SubscribeRequest(selectors=["a:b"], where="x" * 5000),
            "where",
            "limited to 4096 characters; this one has 5000",
        ),
        (
            pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(execnames=["x" * 16])),
            "scope.execnames[0]",
            "15 bytes",
        ),
        (pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(execnames=["a\0b"])), "scope.execnames[0]", "NUL"),
        (pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(execnames=[""])), "scope.execnames[0]", "empty"),
        (
            pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(uids=range(65))),
            "scope",
            "65 comparisons; the limit is 64",
        ),
        (pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(containers=["1"] * 65)), "scope.containers", "65, more"),
        (pb.SubscribeRequest(selectors=["a:b"], scope=pb.Scope(cgroups=["/1"] * 65)), "scope.cgroups", "65, more"),
        (pb.SubscribeRequest(selectors=["a:b"], lease_seconds=61), "lease_seconds", "61 is more than the 60"),
        (pb.SubscribeRequest(selectors=["a:b"], queue_bytes=1 << 21), "queue_bytes", "more than"),
        (pb.SubscribeRequest(selectors=["a:b"], kernel_buffer_kib=65), "kernel_buffer_kib", "more than"),
        (pb.StreamRequest(subscription_id="x"), "encoding", "choose ENCODING_ROWS"),
        (pb.StreamRequest(subscription_id="x", encoding=9), "encoding", "choose ENCODING_ROWS"),  # type: ignore[arg-type]
        (pb.StreamRequest(subscription_id="x", encoding=ROWS, from_seq=0), "from_seq", "from 1"),
        (pb.ListProbesRequest(selectors=["a("]), "selectors[0]", "closing parenthesis"),
        (pb.ListProbesRequest(pids=[0]), "pids[0]", "0 is not a process id"),
        (pb.ListProbesRequest(containers=["1"] * 65), "containers", "65, more than the 64"),
        (pb.ListProbesRequest(cgroups=["/1"] * 65), "cgroups", "65, more than the 64"),
        (pb.WatchProbesRequest(selectors=["a("]), "selectors[0]", "closing parenthesis"),
        (pb.WatchProbesRequest(pids=[-5]), "pids[0]", "-5 is not a process id"),
    ],
)
def test_wrong_request_is_told_its_field(server: Served, request_: Any, field: str, reason: str) -> None:
    call = getattr(server.stub, type(request_).__name__.removesuffix("Request"))
    with pytest.raises(grpc.RpcError) as raised:
        list(call(request_, timeout=PATIENCE_SECONDS))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error: Any = raised.value
    status = rpc_status.from_call(error)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    (violation,) = bad_request.field_violations
    assert violation.field == field
    assert re.search(reason, violation.description)
    info = error_details_pb2.ErrorInfo()
    assert status.details[1].Unpack(info)
    name, _, position = field.partition("[")
    assert (info.metadata["field"], info.metadata.get("index", "")) == (field, position.removesuffix("]"))
    column = re.search(r"\(column (\d+)\)", violation.description)
    # what is parsed has a column, unless it lacks altogether or there is too much of it
    is_text = (bool(position) and name == "selectors") or field == "where"
    assert is_text == (column is not None)
    assert column is None or int(info.metadata["column"]) == int(column[1]) - 1
    assert raised.value.details() == f"{name}: " + re.sub(r" \(column \d+\)$", "", violation.description)
    assert server.engine.calls == []


def refused_with(call: Any) -> tuple[grpc.StatusCode, Any]:
    with pytest.raises(grpc.RpcError) as raised:
        list(call())
    return raised.value.code(), raised.value.details()


@pytest.mark.parametrize(
    ("request_", "excerpt", "caret"),
    [
        (pb.SubscribeRequest(selectors=["a:b"], where="arg0 = 5"), "arg0 = 5", "="),
        (pb.SubscribeRequest(selectors=["a:b"], where="arg0 =="), "arg0 ==", ""),
        (pb.SubscribeRequest(selectors=["a:b", "a:b(arg0,c)"]), "a:b(arg0,c)", "c"),
        (pb.SubscribeRequest(selectors=["a:b"], where="pid==1||" * 60 + "x" + "&&pid" * 600), "||x&&", "x"),
    ],
)
def test_wrong_text_is_told_with_the_place(server: Served, request_: Any, excerpt: str, caret: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        server.stub.Subscribe(request_, timeout=PATIENCE_SECONDS)
    error: Any = raised.value
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.details[1].Unpack(info)
    shown, place = info.metadata["excerpt"], int(info.metadata["caret"])
    assert excerpt in shown
    assert len(shown) <= 80
    assert shown[place : place + 1] == caret


class TestSitesThatDoHarm:
    @pytest.fixture(autouse=True)
    def _probes(self, server: Served, pids: list[int]) -> None:
        self.found = server.file_object(site("short", 0x10), site("long", 0x20, nop_bytes=5), site("other", 0x30))
        server.map(pids[0], self.found)

    def refusals(self, server: Served) -> dict[str, str]:
        return {status.name: status.reason for status in server.subscribe().sites}

    def test_no_engine_is_asked_to_arm_them(self, server: Served) -> None:
        told = "this kernel turns its 5-byte nop into a call at the first hit, which corrupts or crashes programs; "
        told += "compile it with a 1-byte nop, as systemtap's sys/sdt.h does"
        assert self.refusals(server) == {"short": "", "long": told, "other": ""}
        (target,) = server.engine.armed.values()
        assert [wanted.site.name for wanted in target.sites] == ["short", "other"]
        listed = server.stub.ListProbes(pb.ListProbesRequest(), timeout=PATIENCE_SECONDS).probes
        assert {probe.name: probe.sites[0].refused for probe in listed} == {"short": "", "long": told, "other": ""}
        watched = server.stub.WatchProbes(pb.WatchProbesRequest(), timeout=PATIENCE_SECONDS)
        assert [next(watched).probe.sites[0].refused for _ in listed] == ["", told, ""]
        watched.cancel()

    def test_those_that_changed_since_they_were_read(self, server: Served) -> None:
        path = server.folder / "app"
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(0x30)
            file.write(b"\xc3")
        # as if through a mapping
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert self.refusals(server)["other"].startswith("the file changed since it was read: no nop at the location")
        (target,) = server.engine.armed.values()
        assert [wanted.site.name for wanted in target.sites] == ["short"]


class TestWhere:
    def predicate(self, server: Served, pids: list[int], **request: Any) -> Any:
        server.map(pids[0], server.file_object(site("a", arguments=[argument()])))
        server.subscribe(**request)
        (target,) = server.engine.armed.values()
        (wanted,) = target.sites
        return wanted.predicate

    def test_expression_reaches_the_engine(self, server: Served, pids: list[int]) -> None:
        assert self.predicate(server, pids, where="arg0 & 4") == Comparison(ArgumentValue(0), Operator.NE, 0, 4)
        (held,) = server.held()
        assert held.where == "arg0 & 4"

    def test_what_no_engine_tests_is_captured_and_told(self, server: Served, pids: list[int]) -> None:
        server.map(pids[0], server.file_object(site("a", arguments=[argument(), argument()])))
        response = server.subscribe("a(arg0)", where='arg0 == 5 && str(arg1, 4) ~ "S*"')
        (target,) = server.engine.armed.values()
        (wanted,) = target.sites
        assert wanted.predicate == Comparison(ArgumentValue(0), Operator.EQ, 5)
        assert wanted.action.captures == (Capture(0), Capture(1, is_string=True, max_bytes=4))
        assert [(late.text, late.reason) for late in response.evaluated_late] == [
            ('str(arg1, 4) ~ "S*"', "engines test and calculate integers, no strings, bytes or floating-point numbers")
        ]
        assert not server.subscribe("a(arg0)", where="arg0 == 5").evaluated_late

    def test_site_for_which_the_daemon_cannot_evaluate_it_is_refused(self, server: Served, pids: list[int]) -> None:
        server.map(pids[0], server.file_object(site("a", arguments=[argument()])))
        response = server.subscribe("a", where="arg0 + arg1 == 5.0")
        assert states(response.sites) == [("a", REFUSED, "it has 1 argument, so there is no arg1")]

    def test_nothing_asked_for_is_no_predicate(self, server: Served, pids: list[int]) -> None:
        assert self.predicate(server, pids, where=" ", scope=pb.Scope(pids=[pids[0]])) is None

    def test_scope_and_expression_become_one(self, server: Served, pids: list[int], cgroup: str) -> None:
        scope = pb.Scope(uids=[0, 1000, 0], execnames=["ticker"], cgroups=[cgroup])
        found = self.predicate(server, pids, where="arg0 || pid == 7", scope=scope)
        place = cgroups.find(cgroup)
        assert place is not None
        assert found == And(
            (
                Or((Comparison(Field.UID, Operator.EQ, 0), Comparison(Field.UID, Operator.EQ, 1000))),
                Comparison(Field.CGROUP, Operator.EQ, Cgroup(cgroup, place.id, place.level)),
                Comparison(Field.EXECNAME, Operator.EQ, b"ticker"),
                Or((Comparison(ArgumentValue(0), Operator.NE, 0), Comparison(Field.PID, Operator.EQ, 7))),
            )
        )
        (held,) = server.held()
        assert held.scope == scope
        assert held.where == "arg0 || pid == 7"

    @pytest.fixture
    def cgroup(self) -> str:
        """The root, which is there wherever the unified hierarchy is."""
        try:
            cgroups.find("/")
        except KernelFeatureError as error:
            pytest.skip(str(error))
        return "/"


class TestContainers:
    ID, SAME_PREFIX = "abcdef012345" + "0" * 52, "abcdef012345" + "1" * 52
    CGROUPS = ("/", f"/docker/{ID}", f"/docker/{SAME_PREFIX}", "/lxc.payload.web", "/web.slice", f"/web.slice/{ID}")

    @pytest.fixture
    def hierarchy(self) -> FakeHierarchy:
        return FakeHierarchy(self.CGROUPS)

    @pytest.fixture
    def server(self, tmp_path: Path, hierarchy: FakeHierarchy) -> Iterator[Served]:
        with served(tmp_path, hierarchy=hierarchy, container_names=self.names_of) as started:
            yield started

    def names_of(self, ids: Iterable[str]) -> dict[str, str]:
        given = {self.ID: "test/shop/db", self.SAME_PREFIX: "db", "f" * 64: "of none that runs"}
        return {each: given[each] for each in ids if each in given}

    def cgroup(self, path: str) -> Comparison:
        place = FakeHierarchy(self.CGROUPS).find(path)
        assert place is not None
        return Comparison(Field.CGROUP, Operator.EQ, Cgroup(path, place.id, place.level))

    def test_subscription_is_limited_to_all_its_cgroups(self, server: Served, pids: list[int]) -> None:
        server.map(pids[0], server.file_object(site("a")))
        server.subscribe(scope=pb.Scope(containers=[self.ID, "web", "web"]))
        (target,) = server.engine.armed.values()
        paths = [f"/docker/{self.ID}", f"/web.slice/{self.ID}", "/lxc.payload.web"]
        assert target.sites[0].predicate == Or(tuple(map(self.cgroup, paths)))
        (held,) = server.held()
        assert held.scope.containers == [self.ID, "web", "web"]

    def test_what_is_no_one_container(self, server: Served) -> None:
        def refusal(*containers: str) -> Any:
            return refused_with(lambda: [server.subscribe(scope=pb.Scope(containers=containers))])

        for wrong in (self.ID[:11], "we", "", "x" * 1000):
            code, text = refusal("web", wrong)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert text.startswith(
                f"scope.containers: no cgroup of the unified hierarchy is named after a container '{wrong[:100]}"
            )
            assert text.endswith("write its whole name, or at least 12 digits of its id")
            assert len(text) < 300
        both = f"{self.ID} (test/shop/db) and {self.SAME_PREFIX} (db)"
        assert refusal(self.ID[:12]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"scope.containers: '{self.ID[:12]}' matches {both}; write more of it",
        )
        assert refusal("db") == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"scope.containers: 'db' matches {both}; write the id of one",
        )
        assert refusal("of none that runs")[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert server.engine.calls == []

    def test_name_that_an_engine_gave(self, server: Served, pids: list[int]) -> None:
        server.map(pids[0], server.file_object(site("a")))
        server.subscribe(scope=pb.Scope(containers=["shop/db"]))
        (target,) = server.engine.armed.values()
        paths = [f"/docker/{self.ID}", f"/web.slice/{self.ID}"]
        assert target.sites[0].predicate == Or(tuple(map(self.cgroup, paths)))

    def test_list(self, server: Served, pids: list[int], hierarchy: FakeHierarchy) -> None:
        first, second = pids
        found = server.file_object(site("a"))
        server.map(first, found)
        server.map(second, found)
        server.map(second, server.file_object(site("b"), name="other"), "other")
        hierarchy.members |= {f"/docker/{self.ID}": frozenset({first}), "/web.slice": frozenset({first, second, 1})}

        def listed(**request: Any) -> list[tuple[str, list[int]]]:
            response = server.stub.ListProbes(pb.ListProbesRequest(**request), timeout=PATIENCE_SECONDS)
            # objects come in no particular order
            return sorted((probe.name, list(probe.pids)) for probe in response.probes)

        assert listed(containers=[self.ID]) == [("a", [first])]
        assert listed(containers=["web"]) == []
        assert listed(cgroups=["/web.slice"]) == [("a", sorted(pids)), ("b", [second])]
        assert listed(cgroups=["/web.slice"], containers=[self.ID, "web"]) == [("a", [first])]
        assert listed(containers=[self.ID], pids=[second]) == []

    def test_watch_tells_who_comes_to_be_there(self, server: Served, pids: list[int], hierarchy: FakeHierarchy) -> None:
        first, second = pids
        server.map(first, server.file_object(site("a")))
        server.map(second, server.file_object(site("b"), name="other"), "other")
        hierarchy.members["/lxc.payload.web"] = frozenset({first})
        call = server.stub.WatchProbes(pb.WatchProbesRequest(containers=["web"]), timeout=PATIENCE_SECONDS)
        assert next(call).probe.name == "a"
        assert next(call).change == pb.WatchProbesResponse.CHANGE_SNAPSHOT_COMPLETE
        hierarchy.members["/lxc.payload.web"] = frozenset({second})
        changes = [(message.change, message.probe.name) for message in (next(call), next(call))]
        assert changes == [(pb.WatchProbesResponse.CHANGE_REMOVED, "a"), (pb.WatchProbesResponse.CHANGE_ADDED, "b")]
        server.map(second, server.file_object(site("c"), name="third"), "third")
        assert next(call).probe.name == "c"
        call.cancel()


def test_unknown_subscription(server: Served) -> None:
    def streams() -> int:
        gc.collect()
        return sum(type(each) is SubscriptionStream for each in gc.get_objects())

    before = streams()
    for call in (lambda: server.stream("nobody"), lambda: server.unsubscribe("nobody")):
        code, text = refused_with(call)
        assert code is grpc.StatusCode.NOT_FOUND
        assert "nobody" in text
    assert streams() == before


_SERVICE = pb.DESCRIPTOR.services_by_name["StapsdtService"]


@pytest.mark.parametrize(
    "name", [each.name for each in _SERVICE.methods if "subscription_id" in each.input_type.fields_by_name]
)
def test_subscription_without_an_id(server: Served, name: str) -> None:
    request_ = getattr(pb, f"{name}Request")()
    code, text = refused_with(lambda: getattr(server.stub, name)(request_, timeout=PATIENCE_SECONDS))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == "subscription_id: it is missing: Subscribe returns it"


class TestSubscribe:
    def test_nothing_matches_yet(self, server: Served) -> None:
        answer = server.subscribe("nobody:*", lease_seconds=7)
        assert (list(answer.sites), answer.lease_seconds, answer.engine) == ([], 7, "fake")

    def test_defaults_do_not_exceed_what_is_allowed(self, server: Served) -> None:
        assert server.subscribe().lease_seconds == 30
        (subscription,) = server.subscriptions.all()
        spec = subscription[0].spec
        assert (spec.queue_bytes, spec.kernel_buffer_kib) == (LIMITS.max_queue_bytes, LIMITS.max_kernel_buffer_kib)

    def test_what_matches_is_armed_before_it_returns(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a", 1), site("b", 2), site("other", 3))
        server.map(pids[0], found)
        answer = server.subscribe("app:?")
        assert states(answer.sites) == [("a", ARMED, ""), ("b", ARMED, "")]
        assert [status.site_id for status in answer.sites] == [1, 2]
        assert {(status.provider, status.path) for status in answer.sites} == {("app", found.path)}
        (target,) = server.engine.armed.values()
        assert [(wanted.site.name, wanted.site_id, wanted.scope, wanted.predicate) for wanted in target.sites] == [
            ("a", 1, None, None), ("b", 2, None, None),
        ]  # fmt: skip
        assert (target.is_ephemeral, target.exclude_pids) == (False, frozenset())
        assert target.exclude_later == {os.getpid()}

    def test_refusals_carry_the_kernels_words(self, server: Served, pids: list[int]) -> None:
        server.engine.refuse = {"b": str(REJECTED)}
        server.map(pids[0], server.file_object(site("a", 1), site("b", 2), site("c", 3)))
        answer = server.subscribe("app:c(arg0)", "app:*")
        assert states(answer.sites) == [
            ("a", ARMED, ""), ("b", REFUSED, str(REJECTED)),
            ("c", REFUSED, "it has 0 arguments, so there is no arg0"),
        ]  # fmt: skip
        assert "not an instruction boundary" in answer.sites[1].reason
        assert [each.account.sites for each in server.held()] == [1]

    def test_object_that_fits_nothing_is_refused_once(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"), path="/memfd:jit")
        server.map(pids[0], found)
        answer = server.subscribe("app:a(arg3)")
        assert [state for _, state, _ in states(answer.sites)] == [REFUSED]
        server.map(pids[1], found)
        server.in_control(server.subscriptions.housekeeping.clean_up)
        server.unmap(pids[1], found)
        server.unmap(pids[0], found)
        server.unsubscribe(answer.subscription_id)
        assert [message.WhichOneof("payload") for message in server.stream(answer.subscription_id)] == ["end"]
        assert "arm" not in server.engine.calls

    @pytest.mark.parametrize("error", [REJECTED, OSError(24, "Too many open files")])
    def test_one_bad_object_costs_that_object_only(self, server: Served, pids: list[int], error: Exception) -> None:
        server.map(pids[0], server.file_object(site("a")))
        server.engine.failures["arm"] = error
        answer = server.subscribe()
        reasons = [each.reason for each in answer.sites]
        if error is REJECTED:
            assert reasons == [str(error)]
        else:
            path = answer.sites[0].path
            assert reasons == [f"arm {path}: Too many open files; {ARM.remedy(errno.EMFILE)}"]
        server.map(pids[0], server.file_object(site("b"), name="second"), "second")
        del server.engine.failures["arm"]
        server.map(pids[0], server.file_object(site("c"), name="third"), "third")
        statuses = next(server.stream(answer.subscription_id)).status.sites
        assert [(each.name, each.state) for each in statuses] == [("b", REFUSED), ("c", ARMED)]
        # what the engine had begun for the bad ones was given back
        assert server.engine.calls.count("disarm") == 2

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (REJECTED, grpc.StatusCode.FAILED_PRECONDITION),
            (KernelFeatureError("tracefs", "gone", "mount it"), grpc.StatusCode.FAILED_PRECONDITION),
            (OSError(errno.ENOMEM, "Cannot allocate memory"), grpc.StatusCode.FAILED_PRECONDITION),
            (ThreadEndedError(), grpc.StatusCode.FAILED_PRECONDITION),
        ],
    )
    def test_engine_that_cannot_begin(self, server: Served, error: Exception, code: grpc.StatusCode) -> None:
        server.engine.failures["open"] = error
        found, refusal = refused_with(server.subscribe)
        assert found is code
        if isinstance(error, OSError):
            # told of what, and what to do
            assert re.fullmatch(
                r"begin subscription \w+: Cannot allocate memory; memory ran out: .*MemoryMax.*", refusal
            )
        else:
            assert refusal == str(error)
        assert server.held() == []

    def test_error_nobody_thought_of_leaves_no_subscription(self, server: Served, pids: list[int]) -> None:
        server.map(pids[0], server.file_object(site("a")))
        server.engine.failures["arm"] = ZeroDivisionError("a bug")
        code, text = refused_with(server.subscribe)
        assert code is grpc.StatusCode.INTERNAL
        assert "internal error, which is a defect of the server: ZeroDivisionError, a bug; report it" in text
        assert server.held() == []
        assert server.engine.sinks == {}

    def test_number_of_subscriptions_is_bounded(self, server: Served) -> None:
        first = server.subscribe()
        server.subscribe()
        code, text = refused_with(server.subscribe)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 subscriptions" in text
        server.unsubscribe(first.subscription_id)
        server.subscribe()

    def test_every_site_is_answered_however_many(self, server: Served, pids: list[int]) -> None:
        for part in range(3):
            sites = [site(f"n{number}", number) for number in range(4000)]
            server.map(pids[0], server.file_object(*sites, name=f"part{part}"), f"part{part}")
        assert len(server.subscribe().sites) == 12_000

    def test_scope_decides_what_is_armed(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        requests: list[tuple[str, pb.Scope | None]] = [
            ("app:*", pb.Scope(pids=[pids[1]])),
            ("app:*", pb.Scope(exclude_pids=[pids[0]])),
            (f"app{pids[1]}:::", None),
        ]
        for selector, scope in requests:
            answer = server.subscribe(selector, scope=scope)
            assert list(answer.sites) == []
            assert server.engine.armed == {}
            server.map(pids[1], found)
            assert len(server.engine.armed) == 1
            server.unmap(pids[1], found)
            server.unsubscribe(answer.subscription_id)

    def test_excluded_process_that_maps_the_object_is_named(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"))
        server.map(pids[0], found)
        server.map(pids[1], found)
        server.map(os.getpid(), found)
        server.subscribe(scope=pb.Scope(exclude_pids=[pids[1], 4711]))
        (target,) = server.engine.armed.values()
        assert target.exclude_pids == {pids[1], os.getpid()}
        assert target.exclude_later == {4711}

    def test_site_counts_for_whom_both_scope_and_selector_name(self, server: Served, pids: list[int]) -> None:
        found = server.file_object(site("a"), site("b", 2))
        for pid in pids:
            server.map(pid, found)
        first, second = pids
        requests: list[tuple[str, list[int], list[frozenset[int] | None]]] = [
            ("app:*", [], [None, None]),
            ("app:*", pids, [frozenset(pids)] * 2),
            (f"app{first}:::", [], [frozenset({first})] * 2),
            (f"app{first}:::", pids, [frozenset({first})] * 2),
            (f"app{first}:::a app{second}:::", [first], [frozenset({first})]),
        ]
        for selectors, scope, wanted in requests:
            answer = server.subscribe(*selectors.split(), scope=pb.Scope(pids=scope))
            (target,) = server.engine.armed.values()
            assert [each.scope for each in target.sites] == wanted
            server.unsubscribe(answer.subscription_id)


def test_list_subscriptions(server: Served, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("a")))
    scope = pb.Scope(pids=[pids[0]], exclude_pids=[7, 5])
    answer = server.subscribe("app:a", "b:c(arg0)", scope=scope, lease_seconds=20)
    (held,) = server.held()
    assert held.subscription_id == answer.subscription_id
    assert list(held.selectors) == ["app:a", "b:c(arg0)"]
    assert held.scope == pb.Scope(pids=[pids[0]], exclude_pids=[5, 7])
    assert held.created_ns > 10**18
    assert not held.streaming
    assert 0 < held.lease_left_ms <= 20_000
    assert held.account == pb.Account(sites=1)
    call = server.stream(answer.subscription_id)
    server.wait_until_streaming()
    assert server.held()[0].lease_left_ms == 0
    call.cancel()
    server.wait_until_streaming(False)
    server.unsubscribe(answer.subscription_id)
    assert server.held() == []


def test_engine_that_cannot_close_cleanly_costs_no_more_than_that(server: Served) -> None:
    first, second = server.subscribe(), server.subscribe()
    server.engine.failures["close"] = REJECTED
    code, text = refused_with(lambda: server.unsubscribe(first.subscription_id))
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, str(REJECTED))
    assert [held.subscription_id for held in server.held()] == [second.subscription_id]
    (message,) = server.stream(first.subscription_id)
    assert message.end.reason == pb.End.REASON_UNSUBSCRIBED


def test_one_subscription_that_cannot_close_cleanly_keeps_no_other_from_being_revoked(server: Served) -> None:
    server.subscribe()
    server.subscribe()
    server.engine.failures["close"] = REJECTED
    assert server.in_control(lambda: server.subscriptions.revoke(lambda _: False)) == 2
    assert server.held() == []


def test_error_nobody_thought_of_costs_one_subscription_what_appears(server: Served, pids: list[int]) -> None:
    server.subscribe()
    second = server.subscribe()
    server.engine.failures[f"arm {min(server.engine.sinks)}"] = ZeroDivisionError("a bug")
    server.map(pids[0], server.file_object(site("a")))
    statuses = next(server.stream(second.subscription_id)).status.sites
    assert states(statuses) == [("a", ARMED, "")]


def test_health_and_reflection(server: Served) -> None:
    health: Any = health_pb2_grpc.HealthStub(server.channel)
    for name in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    (found,) = reflection.ServerReflectionInfo(iter([question]), timeout=PATIENCE_SECONDS)
    assert SERVICE in [service.name for service in found.list_services_response.service]


def test_path_can_be_served_again_after_a_stop(tmp_path: Path) -> None:
    for _ in range(2):
        with served(tmp_path) as started:
            assert started.held() == []


def test_subscription_of_a_client_that_gave_up_is_ended(server: Served, pids: list[int]) -> None:
    server.map(pids[0], server.file_object(site("a")))
    request = pb.SubscribeRequest(selectors=["app:*"], lease_seconds=60)
    with server.control_held():
        asked, refreshes = server.control.asked, server.watcher.refreshes
        call = server.stub.Subscribe.future(request, timeout=PATIENCE_SECONDS)
        wait_for(lambda: server.control.asked == asked + 1, "the request")
        call.cancel()
        # what ends it waits behind what begins it
        wait_for(lambda: server.control.asked == asked + 2, "the server to notice")
    assert call.code() is grpc.StatusCode.CANCELLED
    # sooner than its lease would end it
    assert server.in_control(server.subscriptions.all) == []
    assert server.watcher.refreshes == refreshes + 1, "it began"
    assert server.subscriptions.totals.metrics().subscriptions == 0
    assert server.engine.sinks == {}
    assert server.engine.armed == {}
