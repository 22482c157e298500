"""`stapsdt trace` as its own process, against a server on a real socket."""

from __future__ import annotations

import itertools
import json
import os
import pty
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.commands import PROGRAM, Start, finish, starting
from tests.api.fake_server import FakeServer, armed, bad_request, serving

SIMPLE_PROTOCOL = (
    "stapsdt: postgresql:query__start: fired in the simple protocol only; others fire query__execute__start"
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture
def trace(server: FakeServer) -> Iterator[Start]:
    """Starts a trace of `postgresql:*`, whose probe here is not the one that the package knows."""
    with starting("--server", server.target, "trace", "--no-signatures", "postgresql:*") as start:
        yield start


def test_files_are_the_hosts(server: FakeServer, trace: Start) -> None:
    server.fire()
    process = trace("--count", "1", "--file", "build/../app", "--file", "/opt/*/bin")
    assert finish(process)[0] == 0
    (request,) = server.asked("SubscribeRequest")
    # the server follows links, which .. may depend on
    assert list(request.files) == [f"{os.getcwd()}/build/../app", "/opt/*/bin"]


def test_json(server: FakeServer, trace: Start) -> None:
    server.fire()
    server.fire(values=[pb.Value(string=b'"\x1b\xff'), pb.Value(unavailable="page not resident")])
    process = trace("--json", "--count", "2", "--pid", "4711", "--buffer", "256", "--queue", "4096")
    status, out, err = finish(process)
    assert status == 0
    assert [json.loads(line) for line in out] == [
        {
            "seq": 1,
            "time_ns": 1_700_000_000_000_000_001,
            "pid": 4711,
            "tid": 4712,
            "cpu": 1,
            "comm": "postgres",
            "provider": "postgresql",
            "name": "query__start",
            "path": "/usr/bin/postgres",
            "module": "postgres",
            "function": "exec_simple_query",
            "offset": 0x1234,
            "args": ["SELECT 1", 42],
        },
        json.loads(out[0])
        | {
            "seq": 2,
            "time_ns": 1_700_000_000_000_000_002,
            "args": ['"\x1b\\xff', None],
            "unavailable": {"1": "page not resident"},
        },
    ]
    assert [json.loads(line) for line in err] == [{"delivered": 2, "filtered": 0, "lost": 0, "sites": 1}]
    (request,) = server.asked("SubscribeRequest")
    assert request.scope == pb.Scope(pids=[4711], exclude_pids=[process.pid])
    assert (request.kernel_buffer_kib, request.queue_bytes) == (256, 4096)
    assert server.asked("UnsubscribeRequest")


def test_unread_is_explained(server: FakeServer, trace: Start) -> None:
    server.fire(10)
    _, out, err = finish(trace("--count", "4"))
    assert len(out) == 4
    told = "4 events delivered, 0 filtered, 0 lost, 6 unread (fired after the last one shown), 1 site"
    assert err[-1] == f"stapsdt: {told}"


def test_count_leaves_the_rest_unread(server: FakeServer, trace: Start) -> None:
    server.fire(10)
    server.account.filtered = 3
    status, out, err = finish(trace("--json", "--count", "4"))
    assert status == 0
    assert len(out) == 4
    assert json.loads(err[-1]) == {"delivered": 4, "filtered": 3, "lost": 0, "sites": 1, "unread": 6}


def test_duration_prints_all_that_fired_before_its_end(server: FakeServer, trace: Start) -> None:
    with server.hold_unsubscribe():
        process = trace("--json", "--duration", "0.3")
        server.wait_for("UnsubscribeRequest")
        server.fire(2)
    status, out, err = finish(process)
    assert status == 0
    assert len(out) == 2
    assert json.loads(err[-1]) == {"delivered": 2, "filtered": 0, "lost": 0, "sites": 1}


def test_probes_that_are_still_being_disarmed_are_told(server: FakeServer, trace: Start) -> None:
    server.still_disarming = True
    server.fire(1)
    status, _, err = finish(trace("--json", "--count", "1"))
    assert status == 0
    assert err[0].startswith("stapsdt: still disarming: the kernel takes longer than usual")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(server: FakeServer, trace: Start, number: signal.Signals) -> None:
    process = trace("--json")
    server.wait_for("StreamRequest")
    server.fire()
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["seq"] == 1, "a single event is not held back"
    process.send_signal(number)
    status, out, err = finish(process)
    assert (status, out) == (0, [])
    assert json.loads(err[-1]) == {"delivered": 1, "filtered": 0, "lost": 0, "sites": 1}
    assert server.asked("UnsubscribeRequest")


def test_a_second_sigint_exits_at_once(server: FakeServer, trace: Start) -> None:
    process = trace("--json")
    server.wait_for("StreamRequest")
    with server.hold_unsubscribe():
        process.send_signal(signal.SIGINT)
        server.wait_for("UnsubscribeRequest")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


def test_a_reader_that_leaves_ends_it_quietly(server: FakeServer, trace: Start) -> None:
    process = trace("--json")
    server.wait_for("StreamRequest")
    server.fire()
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    server.fire(3)
    assert process.stderr is not None
    summary = json.loads(process.stderr.read())
    assert process.wait(20) == 0
    assert summary["delivered"] + summary["unread"] == 4
    assert server.asked("UnsubscribeRequest")


def test_losses_are_told_at_once_and_in_the_summary(server: FakeServer, trace: Start) -> None:
    server.fire()
    server.lose(5)
    server.end(pb.End.REASON_UNSUBSCRIBED)
    status, _, err = finish(trace("--json"))
    assert status == 0
    assert json.loads(err[0]) == {"loss": {"queue": 5}}
    summary = json.loads(err[1])
    assert summary["lost"] == 5
    assert summary["lost_by_stage"]["queue"] == 5


def test_a_stream_that_breaks_goes_on(server: FakeServer, trace: Start) -> None:
    server.fire(2)
    server.break_after = 2
    process = trace("--json", "--count", "3")
    assert process.stderr is not None
    assert "interrupted" in json.loads(process.stderr.readline())
    server.fire()
    status, out, _ = finish(process)
    assert status == 0
    assert [json.loads(line)["seq"] for line in out] == [1, 2, 3]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (pb.End.REASON_SERVER_STOPPING, "the server stopped"),
        (pb.End.REASON_LEASE_EXPIRED, "the server dropped the subscription after 30 s without a reader"),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_failure(server: FakeServer, trace: Start, reason: int, told: str) -> None:
    server.fire()
    server.end(reason)
    status, out, err = finish(trace("--json", "--no-retry"))
    assert status == 1
    assert len(out) == 1
    assert told in err[0]
    assert json.loads(err[1])["delivered"] == 1


def test_a_forgotten_subscription_is_a_failure_with_a_summary(server: FakeServer, trace: Start) -> None:
    server.break_after = 0
    server.refuse_after_break = (grpc.StatusCode.NOT_FOUND, "no subscription 'sub-1'")
    status, _, err = finish(trace("--json"))
    assert status == 1
    assert err[-2] == "stapsdt: the server forgot the subscription: it was restarted, or had no reader for 30 s"
    record = json.loads(err[-1])
    assert (record["delivered"], record["account"]) == (0, "unknown")
    assert "filtered" not in record


def test_the_stream_is_open_before_hints_are_looked_for(server: FakeServer) -> None:
    """They may take longer than the lease."""
    server.fire()
    server.list_waits_for = "StreamRequest"
    with starting("--server", server.target, "trace", "app:none", "--count", "1") as start:
        status, out, err = finish(start())
    assert (status, len(out)) == (0, 1)
    assert any("no such probe" in line or "no running program" in line for line in err)


def test_a_count_without_an_account_shows_what_it_knows(server: FakeServer) -> None:
    """As after the server was killed."""
    keys = pb.Column(type=pb.Column.TYPE_SIGNED, data=(7).to_bytes(8, "little"))
    counts = pb.Column(type=pb.Column.TYPE_SIGNED, data=(3).to_bytes(8, "little"))
    snapshot = pb.Snapshot(number=1, count=1, keys=[keys], values=[counts], account=pb.Account(aggregated=3))
    server.tell(pb.StreamResponse(snapshot=snapshot))
    server.break_after = 2
    server.refuse_after_break = (grpc.StatusCode.NOT_FOUND, "no subscription 'sub-1'")
    with starting("--server", server.target, "count", "postgresql:*", "--by", "pid") as start:
        status, out, err = finish(start())
    assert status == 1
    assert [line.split() for line in out][-1] == ["3", "7"]
    assert err[-2] == "stapsdt: the server forgot the subscription: it was restarted, or had no reader for 30 s"
    assert err[-1] == "stapsdt: 3 events received; what else fired is unknown: the server gave no account"


def clock_set(**change: int) -> pb.StreamResponse:
    return pb.StreamResponse(status=pb.Status(clock_changes=[pb.ClockChange(time_ns=9, monotonic_ns=5, **change)]))


def test_a_clock_that_is_set_is_told(server: FakeServer, trace: Start) -> None:
    server.tell(clock_set(by_ns=3600 * 10**9))
    # a stream that is opened again tells it again
    server.tell(clock_set(by_ns=3600 * 10**9))
    server.end(pb.End.REASON_UNSUBSCRIBED)
    _, _, err = finish(trace())
    assert err[1:-1] == ["stapsdt: the clock was set forward by 3,600 s", SIMPLE_PROTOCOL]


def test_a_clock_that_is_set_is_a_record(server: FakeServer, trace: Start) -> None:
    server.tell(clock_set(by_ns=-1500))
    server.end(pb.End.REASON_UNSUBSCRIBED)
    _, _, err = finish(trace("--json"))
    (record,) = [each for each in map(json.loads, err) if "clock_set" in each]
    assert record == {"clock_set": {"time_ns": 9, "monotonic_ns": 5, "by_ns": -1500, "suspended_ns": 0}}


@pytest.mark.parametrize(
    "command", [("count", "postgresql:*"), ("top", "postgresql:*"), ("d", "-n", "postgresql*:::{}")]
)
def test_each_command_tells_that_the_host_was_suspended(server: FakeServer, command: tuple[str, ...]) -> None:
    server.tell(clock_set(by_ns=-1500, suspended_ns=2 * 10**9))
    server.end(pb.End.REASON_UNSUBSCRIBED)
    with starting("--server", server.target, *command) as start:
        _, _, err = finish(start())
    assert "stapsdt: the clock was set back by 0.0000015 s; the host was suspended for 2 s" in err


def test_human_lines(server: FakeServer, trace: Start) -> None:
    server.missing = "gone"
    nasty = pb.Value(string=b'a "quoted" \x1b[2J [red]')
    server.values = [nasty, pb.Value(unsigned=0x7F31_C0DE_4000), pb.Value(unavailable="gone")]
    server.fire(comm="ev\x1bil")
    server.sites = [armed(), armed(2, pb.SiteStatus.STATE_REFUSED, "no room\n")]
    status, out, err = finish(trace("--count", "1", env=os.environ | {"TZ": "UTC"}))
    assert status == 0
    what = r'postgresql:query__start  "a \"quoted\" \x1b[2J [red]" 139851665915904 <gone>'
    assert out == [rf"22:13:20.000000  ev\x1bil             4711/4712    1  {what}"]
    assert err == [
        "stapsdt: 1 site armed, 1 site refused; Ctrl-C stops",
        r"stapsdt: refused: no room\n: postgresql:query__start at /usr/bin/postgres+0x1234",
        "stapsdt: 1 event delivered, 0 filtered, 0 lost, 1 site",
    ]


def test_refusals_are_told_by_reason(server: FakeServer, trace: Start) -> None:
    refused = [("no room", 2), ("its nop is odd", 97), ("a", 1), ("b", 1), ("c", 1)]
    reasons = [reason for reason, count in refused for _ in range(count)]
    server.sites = [
        armed(site_id, pb.SiteStatus.STATE_REFUSED, reason) for site_id, reason in enumerate(reasons, start=1)
    ]
    server.sites.append(armed(200))
    server.end(pb.End.REASON_UNSUBSCRIBED)
    _, _, err = finish(trace())
    example = "postgresql:query__start at /usr/bin/postgres+0x1234"
    assert err[:-1] == [
        "stapsdt: 1 site armed, 102 sites refused; Ctrl-C stops",
        f"stapsdt: refused: its nop is odd: {example} and 96 more",
        f"stapsdt: refused: no room: {example} and 1 more",
        f"stapsdt: refused: a: {example}",
        "stapsdt: refused: for 2 more reasons",
        SIMPLE_PROTOCOL,
    ]


def test_trace_whose_sites_are_all_refused_ends_at_once(server: FakeServer, trace: Start) -> None:
    server.sites = [armed(state=pb.SiteStatus.STATE_REFUSED, reason="no room")]
    status, out, err = finish(trace("--json"))
    assert (status, out) == (1, [])
    assert err[0] == "stapsdt: every site that matches was refused"
    refusals = {"refused": 1, "refusals": [{"reason": "no room", "sites": 1}]}
    assert json.loads(err[1]) == {"delivered": 0, "filtered": 0, "lost": 0, "sites": 0} | refusals
    assert server.asked("UnsubscribeRequest")


@pytest.mark.parametrize("is_json", [False, True])
def test_trace_ends_with_its_processes(server: FakeServer, trace: Start, *, is_json: bool) -> None:
    server.fire()
    server.end(pb.End.REASON_PROCESSES_ENDED)
    status, out, err = finish(trace("--pid", "4711", *(["--json"] if is_json else [])))
    assert (status, len(out)) == (0, 1)
    if is_json:
        assert json.loads(err[-1]) == {
            "delivered": 1, "filtered": 0, "lost": 0, "sites": 1, "processes_ended": True,
        }  # fmt: skip
    else:
        assert err[-1] == ("stapsdt: 1 event delivered, 0 filtered, 0 lost, 1 site; every process of --pid has ended")


def test_trace_that_never_matched_fails(server: FakeServer, trace: Start) -> None:
    server.sites = []
    server.listing = pb.ListProbesResponse()
    server.account = pb.Account()
    status, _, err = finish(trace("--duration", "0.1"))
    assert status == 1
    assert err[0] == "stapsdt: postgresql:*: no running program has static probes yet"
    nothing = "stapsdt: no probe matched; name files of programs that end within milliseconds with --file"
    assert err[-2:] == [nothing, "stapsdt: 0 events delivered, 0 filtered, 0 lost, 0 sites"]


@pytest.mark.parametrize("is_json", [False, True])
def test_selector_that_matches_nothing_is_explained_beside_one_that_does(
    server: FakeServer, trace: Start, *, is_json: bool
) -> None:
    server.info.access.CopyFrom(pb.Access(client="uid 7", role="user", list=pb.Users(uids=[7])))
    server.fire()
    status, _, err = finish(trace("postgresql:query__strt", "--count", "1", *(["--json"] if is_json else [])))
    assert status == 0
    if is_json:
        assert json.loads(err[0]) == {
            "unmatched": [
                {"selector": "postgresql:query__strt", "reason": "no such probe yet", "nearest": ["query__start"]}
            ]
        }
    else:
        assert err[:3] == [
            "stapsdt: postgresql:query__strt: no such probe yet; did you mean query__start?",
            "stapsdt: your role, user, hides other users' processes, which may have such probes",
            "stapsdt: 1 site armed; Ctrl-C stops",
        ]


@pytest.mark.parametrize("is_json", [False, True])
def test_what_of_the_filter_is_not_evaluated_at_the_hit_is_told(
    server: FakeServer, trace: Start, *, is_json: bool
) -> None:
    server.late = [pb.LateCondition(text='str(arg0) ~ "S*"', reason="for a reason")]
    server.fire()
    status, _, err = finish(trace("--count", "1", *(["--json"] if is_json else [])))
    assert status == 0
    if is_json:
        assert json.loads(err[0]) == {"evaluated_late": {'str(arg0) ~ "S*"': "for a reason"}}
    else:
        assert err[0] == 'stapsdt: the server evaluates str(arg0) ~ "S*" after the hit, for every event: for a reason'


@pytest.mark.parametrize("is_json", [False, True])
def test_silence_is_explained_where_that_can_be_known(server: FakeServer, trace: Start, *, is_json: bool) -> None:
    monitor = armed()
    monitor.provider, monitor.name = "hotspot", "monitor__wait"
    server.sites = [monitor]
    server.listing = pb.ListProbesResponse()
    status, _, err = finish(trace("hotspot:*", "--duration", "0.1", *(["--json"] if is_json else [])))
    assert status == 0
    silent = [
        "hotspot:monitor__*: the JVM fires these only with -XX:+DTraceMonitorProbes",
        "no running program has these probes now",
    ]
    if is_json:
        assert json.loads(err[-1]) == {"delivered": 0, "filtered": 0, "lost": 0, "sites": 1, "silent": silent}
    else:
        assert err[-3:] == [
            *(f"stapsdt: {reason}" for reason in silent),
            "stapsdt: 0 events delivered, 0 filtered, 0 lost, 1 site",
        ]


@pytest.mark.parametrize(("options", "is_told"), [((), True), (("--follow",), False)])
def test_children_that_are_left_out_are_told_of(server: FakeServer, options: tuple[str, ...], *, is_told: bool) -> None:
    server.sites = [armed()]
    with starting("--server", server.target, "trace", "postgresql:*", "--duration", "0.1") as start:
        _, _, err = finish(start("--pid", str(os.getpid()), *options))
    told = "stapsdt: what --pid has forked was left out: --follow includes it"
    assert (told in err) is is_told


def test_a_known_probes_arguments_have_names(server: FakeServer) -> None:
    for probe in (server.described, server.listing.probes[0]):
        del probe.sites[0].arguments[1:]
    server.values = [pb.Value(string=b"SELECT 1")]
    server.fire()
    with starting("--server", server.target, "trace", "--count", "1") as start:
        status, out, err = finish(start("postgresql:query__start"))
        assert (status, out[0].partition("query__start  ")[2]) == (0, 'query="SELECT 1"'), err
        assert finish(start("postgresql:query__start(query:hex)", "--where", "query != 0"))[0] == 0
        assert "named" not in finish(start("postgresql:query__start", "--json", "--no-signatures"))[1][0]
    requests = server.asked("SubscribeRequest")
    assert [list(request.selectors) for request in requests] == [
        ["postgresql:query__start(arg0:str)"],
        ["postgresql:query__start(arg0:hex)"],
        ["postgresql:query__start"],
    ]
    assert [request.where for request in requests] == ["", "arg0 != 0", ""]


def test_own_signatures_are_used_and_a_wrong_file_is_told(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = """
        provider = "postgresql"
        source = "mine"
        versions = "1"
        [enums.answer]
        42 = "the answer"
        [[probes]]
        name = "query__start"
        text = "Mine."
        arguments = ["string sql", "enum(answer) number"]
    """
    (tmp_path / "own.toml").write_text(own)
    (tmp_path / "wrong.toml").write_text('provider = "shop"\nsource = "x"\nversions = "1"\n[[probes]]\nname = 1\n')
    monkeypatch.setenv("STAPSDT_SIGNATURES", str(tmp_path))
    server.fire()
    with starting("--server", server.target, "trace", "--count", "1") as start:
        status, out, err = finish(start("postgresql:query__start"))
    assert (status, out[0].partition("query__start  ")[2]) == (0, 'sql="SELECT 1" number=the answer')
    assert err[0] == (f"stapsdt: {tmp_path}/wrong.toml: probes[0].name: Expected `str`, got `int`; the file is skipped")


@pytest.mark.parametrize("selector", ["postgresql:*", "query__start"])
def test_globs_have_names_and_strings(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: str
) -> None:
    own = """
        provider = "postgresql"
        source = "mine"
        versions = "1"
        [[probes]]
        name = "query__start"
        text = "Mine."
        arguments = ["string sql", "int32 number"]
    """
    (tmp_path / "own.toml").write_text(own)
    monkeypatch.setenv("STAPSDT_SIGNATURES", str(tmp_path))
    server.fire()
    with starting("--server", server.target, "trace", "--count", "1") as start:
        status, out, err = finish(start(selector))
    assert (status, out[0].partition("query__start  ")[2]) == (0, 'sql="SELECT 1" number=42')
    (request,) = server.asked("SubscribeRequest")
    assert request.selectors[0] == "postgresql:::query__star[t](arg0:str, arg1)"
    assert request.selectors[-1] == selector
    assert err == ["stapsdt: 1 site armed; Ctrl-C stops", "stapsdt: 1 event delivered, 0 filtered, 0 lost, 1 site"]


def test_a_contradicted_signature_is_told_once_by_a_glob(server: FakeServer) -> None:
    """The package's has one argument, the fake server's probe two."""
    server.fire(values=[pb.Value(unsigned=0x7F00), pb.Value(signed=42)])
    with starting("--server", server.target, "trace", "--count", "1") as start:
        status, out, err = finish(start("postgresql:*"))
    assert (status, out[0].partition("query__start  ")[2]) == (0, "0x7f00 42")
    assert sum("its signature is not used" in line for line in err) == 1


def test_trace_waits_although_its_role_may_not_list(server: FakeServer, trace: Start) -> None:
    server.sites = []
    server.refuse_list = (grpc.StatusCode.PERMISSION_DENIED, "role r does not allow listing probes")
    process = trace("--count", "1")
    assert process.stderr is not None
    assert "no probe matches yet: waiting" in process.stderr.readline()
    server.tell(pb.StreamResponse(status=pb.Status(sites=[armed()])))
    server.fire()
    assert finish(process)[0] == 0


def test_no_wait_fails_at_once(server: FakeServer, trace: Start) -> None:
    server.refuse = (grpc.StatusCode.NOT_FOUND, "no probe matches")
    status, out, err = finish(trace("postgresqk:query", "--no-wait"))
    assert (status, out) == (1, [])
    assert "; ".join(err) == (
        "stapsdt: postgresql:*: no such probe in the selected processes, modules and functions yet; "
        "postgresqk:query: no running program has a provider postgresqk yet; did you mean postgresql:query?"
    )
    (request,) = server.asked("SubscribeRequest")
    assert request.require_match


def test_nothing_that_matches_is_waited_for(server: FakeServer, trace: Start) -> None:
    server.sites = []
    process = trace("--count", "1")
    assert process.stderr is not None
    assert "postgresql:*: no such probe in the selected processes" in process.stderr.readline()
    assert "no probe matches yet: waiting" in process.stderr.readline()
    server.tell(pb.StreamResponse(status=pb.Status(sites=[armed()])))
    assert process.stderr.readline() == "stapsdt: 1 site armed\n"
    server.fire()
    status, _, err = finish(process)
    assert status == 0
    assert err == ["stapsdt: 1 event delivered, 0 filtered, 0 lost, 1 site"]


def test_a_terminal_gets_colours(server: FakeServer, trace: Start) -> None:
    server.fire()
    ours, theirs = pty.openpty()
    try:
        process = trace("--count", "1", stdout=theirs, env=os.environ | {"TERM": "xterm", "NO_COLOR": ""})
        shown = os.read(ours, 4096)
        assert process.wait(20) == 0
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"\x1b[36mpostgresql:query__start\x1b[0m" in shown


def test_filters_are_asked_for(server: FakeServer, trace: Start) -> None:
    server.end(pb.End.REASON_UNSUBSCRIBED)
    process = trace(
        *("--where", "arg1 > 3", "--uid", "0", "--uid", "1000", "--execname", "psql", "--cgroup", "/a"),
        *("--container", "c0ffee012345", "--container", "web", "--clients", "--json"),
    )
    assert finish(process)[0] == 0
    (request,) = server.asked("SubscribeRequest")
    assert request.where == "arg1 > 3"
    assert request.scope == pb.Scope(
        exclude_pids=[process.pid],
        uids=[0, 1000],
        execnames=["psql"],
        cgroups=["/a"],
        containers=["c0ffee012345", "web"],
        include_clients=True,
    )


def test_users_by_name_and_processes_left_out(server: FakeServer, trace: Start) -> None:
    server.end(pb.End.REASON_UNSUBSCRIBED)
    process = trace("--uid", "root", "--uid", "7", "--exclude-pid", "4711", "-p", "4712", "--json")
    assert finish(process)[0] == 0
    (request,) = server.asked("SubscribeRequest")
    assert request.scope == pb.Scope(pids=[4712], exclude_pids=[process.pid, 4711], uids=[0, 7])


def test_user_that_does_not_exist(trace: Start) -> None:
    status, _, err = finish(trace("--uid", "no such"))
    told = "invalid value for '--uid': this host has no user 'no such'; give the user's id; see 'stapsdt trace --help'"
    assert (status, err) == (2, [f"stapsdt: error: {told}"])


def test_user_id_that_is_too_large(trace: Start) -> None:
    status, _, err = finish(trace("--uid", "4294967296"))
    assert status == 2
    assert "4294967296 is not the id of a user; the largest is 4294967295" in err[0]


def test_output_to_a_file(server: FakeServer, trace: Start, tmp_path: Path) -> None:
    server.fire(2)
    path = tmp_path / "events.jsonl"
    status, out, err = finish(trace("--count", "2", "--json", "-o", str(path)))
    assert (status, out) == (0, [])
    assert [json.loads(line)["seq"] for line in path.read_text().splitlines()] == [1, 2]
    assert json.loads(err[-1])["delivered"] == 2


def test_output_to_a_file_that_cannot_be_written(server: FakeServer, trace: Start, tmp_path: Path) -> None:
    path = tmp_path / "none" / "events"
    assert finish(trace("-o", str(path))) == (1, [], [f"stapsdt: {path}: No such file or directory"])
    assert not server.requests


def wrong_where() -> status_pb2.Status:
    refusal = bad_request("where", "unexpected '='; write == (column 7)")
    info = error_details_pb2.ErrorInfo(metadata={"excerpt": "\x1barg0 = 5", "caret": "6"})
    refusal.details.add().Pack(info)
    return refusal


def test_wrong_expression_is_one_line(server: FakeServer, trace: Start) -> None:
    server.refuse = wrong_where()
    line = "stapsdt: --where: unexpected '='; write == (column 7)"
    assert finish(trace("--where", "\x1barg0 = 5")) == (2, [], [line])


def test_terminal_is_shown_where_an_expression_is_wrong(server: FakeServer, trace: Start) -> None:
    server.refuse = wrong_where()
    ours, theirs = pty.openpty()
    shown = b""
    try:
        process = trace("--where", "\x1barg0 = 5", stderr=theirs)
        assert process.wait(20) == 2
        while shown.count(b"\n") < 3:
            shown += os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    _, text, mark = shown.decode().splitlines()
    assert text == r"  \x1barg0 = 5"
    assert mark.index("^") == text.index("=")


def test_a_bad_selector_is_wrong_usage(server: FakeServer, trace: Start) -> None:
    server.refuse = bad_request("selectors[0]", "a colon is missing")
    assert finish(trace()) == (2, [], ["stapsdt: selectors: a colon is missing"])


@pytest.mark.parametrize(
    ("count", "stage", "advice"),
    [
        (10, pb.Loss.STAGE_KERNEL_BUFFER, "LOST 10 events in kernel_buffer: a larger --buffer holds longer bursts"),
        (50_000_000, pb.Loss.STAGE_KERNEL_BUFFER, "they come faster than any buffer helps: 'stapsdt count' adds"),
        (10, pb.Loss.STAGE_QUOTA, "they exceed what your role may have, or your part of a processor"),
    ],
)
def test_advice_fits_the_loss(server: FakeServer, trace: Start, count: int, stage: int, advice: str) -> None:
    server.lose(count, stage)
    server.fire()
    _, _, err = finish(trace("--count", "1"))
    assert any(advice in line for line in err), err


def test_messages_speak_of_options(server: FakeServer, trace: Start) -> None:
    server.refuse = bad_request("scope.pids", "there is no process 5")
    assert finish(trace("--pid", "5")) == (2, [], ["stapsdt: --pid: there is no process 5"])


def test_when_a_named_probe_fires_is_told_at_the_start(server: FakeServer) -> None:
    site = armed()
    site.provider, site.name = "python", "function__entry"
    server.sites = [site]
    server.fire()
    with starting("--server", server.target, "trace") as start:
        _, _, err = finish(start("python:function__entry", "--count", "1", "--no-signatures"))
        assert [line for line in err if "CPython 3.11 fires it only" in line], err
        _, _, err = finish(start("python:f*", "--count", "1", "--no-signatures"))
        assert not [line for line in err if "CPython 3.11 fires it only" in line], err


def test_background_job_of_a_script_ends_when_it_is_told_to(server: FakeServer) -> None:
    """Shells have such jobs ignore SIGINT."""
    script = "trap '' INT; exec " + shlex.join(PROGRAM) + f" --server {server.target} trace postgresql:*"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        server.wait_for("StreamRequest")
        server.fire()
        assert job.stdout is not None
        assert job.stdout.readline()
        job.send_signal(signal.SIGINT)
        status, _, err = finish(job)
    assert status == 0
    assert err[-1].startswith("stapsdt: 1 event delivered")


def test_command_of_a_background_job_ignores_what_it_is_to(server: FakeServer) -> None:
    command = ["grep", "SigIgn", "/proc/self/status"]
    script = (
        "trap '' INT; exec "
        + shlex.join(PROGRAM)
        + f" --server {server.target} trace postgresql:* -- "
        + " ".join(command)
    )
    job = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True, timeout=20)
    ignored = int(job.stdout.split()[1], 16)
    assert ignored >> signal.SIGINT - 1 & 1


def test_a_command_starts_once_what_matches_is_armed(server: FakeServer, tmp_path: Path) -> None:
    arming = armed(2, pb.SiteStatus.STATE_ARMING)
    server.sites.append(arming)
    began = tmp_path / "began"
    with starting("--server", server.target, "trace", "postgresql:*", "--", "touch", str(began)) as start:
        running = start()
        assert running.stderr is not None
        said = list(
            itertools.takewhile(lambda line: "the command waits for 1 site to be armed" not in line, running.stderr)
        )
        assert "stapsdt: whoever else runs /usr/bin/postgres pays for hits there, too, until the end\n" in said
        assert not began.exists()
        arming.state = pb.SiteStatus.STATE_ARMED
        server.tell(pb.StreamResponse(status=pb.Status(sites=[arming])))
        status, _, _ = finish(running)
    assert status == 0
    assert began.exists()


def test_a_command_waits_until_the_server_knows_what_is_installed(server: FakeServer, tmp_path: Path) -> None:
    server.info.inventory.state = pb.Inventory.STATE_SCANNING
    began = tmp_path / "began"
    with starting("--server", server.target, "trace", "app:none", "--", "touch", str(began)) as start:
        running = start()
        assert running.stderr is not None
        assert "the server still looks for installed files" in running.stderr.readline()
        server.wait_for("UnsubscribeRequest")
        assert not began.exists()
        server.info.inventory.state = pb.Inventory.STATE_CURRENT
        status, _, _ = finish(running)
    assert began.exists()
    assert (status, len(server.asked("SubscribeRequest"))) == (0, 2)
