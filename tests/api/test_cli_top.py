"""`stapsdt top` as its own process, against a server on a real socket."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import termios
from collections.abc import Iterator

import pytest

from stapsdtd.client.restarts import RESTART_SECONDS
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.commands import Start, finish, starting
from tests.api.fake_server import FakeServer, armed, bad_request, serving

BINARY = "/usr/bin/postgres"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        fake.values = []
        yield fake


@pytest.fixture
def top(server: FakeServer) -> Iterator[Start]:
    with starting("--server", server.target, "top") as start:
        yield start


def test_json_counts_all_that_fired(server: FakeServer, top: Start) -> None:
    server.count((BINARY, 4711, "postgres", 3), (BINARY, 4713, "other", 2), seconds=0.5)
    server.count(seconds=2)
    server.account.filtered = 7
    status, out, err = finish(top("--json", "--count", "2", "--interval", "0.2"))
    assert status == 0
    intervals = [json.loads(line) for line in out]
    assert [(each["seconds"], each["count"], each["rate"], each["total"]) for each in intervals] == [
        (0.5, 5, 10, 5),
        (2, 0, 0, 5),
    ]
    (probe,) = [probe for each in intervals for probe in each["probes"]]
    assert probe == {
        "provider": "postgresql", "name": "query__start", "path": BINARY,
        "count": 5, "rate": 10, "total": 5, "processes": 2,
    }  # fmt: skip
    assert [(each["pid"], each["comm"], each["total"]) for whole in intervals for each in whole["processes"]] == [
        (4711, "postgres", 3),
        (4713, "other", 2),
    ]
    assert [json.loads(line) for line in err] == [{"delivered": 5, "filtered": 7, "lost": 0, "sites": 1}]
    assert server.asked("UnsubscribeRequest")


def test_names_of_arguments_are_resolved(server: FakeServer, top: Start) -> None:
    del server.listing.probes[0].sites[0].arguments[1:]
    done = finish(top("postgresql:query__start", "--where", "query != 0", "--duration", "0.1"))
    assert done[0] == 0, done
    (request,) = server.asked("SubscribeRequest")
    assert (list(request.selectors), request.where) == (["postgresql:query__start"], "arg0 != 0")


def test_what_is_asked_of_the_server(server: FakeServer, top: Start) -> None:
    process = top("--duration", "0.1", "--interval", "0.25")
    assert finish(process)[0] == 0
    options = (
        "--pid",
        "1",
        "--uid",
        "2",
        "--execname",
        "x",
        "--cgroup",
        "/a",
        "--container",
        "web",
        "--where",
        "pid > 1",
    )
    second = top("a:b", "c::d:e(arg0)", *options, "--duration", "0.1")
    assert finish(second)[0] == 0
    first_request, request = server.asked("SubscribeRequest")
    assert list(first_request.selectors) == ["*:*"]
    assert first_request.aggregation == pb.Aggregation(
        functions=[pb.AggregateFunction(function=pb.AggregateFunction.FUNCTION_COUNT)],
        by=["provider", "name", "module_path", "pid", "execname"],
        interval_ms=250,
    )
    assert first_request.scope == pb.Scope(exclude_pids=[process.pid])
    assert list(request.selectors) == ["a:b", "c::d:e"]
    assert request.where == "pid > 1"
    assert request.scope == pb.Scope(
        pids=[1], exclude_pids=[second.pid], uids=[2], execnames=["x"], cgroups=["/a"], containers=["web"]
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(server: FakeServer, top: Start, number: signal.Signals) -> None:
    process = top("postgresql:*", "--json", "--interval", "0.1")
    assert process.stdout is not None
    server.count()
    process.stdout.readline()
    server.count((BINARY, 1, "a", 4))
    process.send_signal(number)
    status, out, err = finish(process)
    assert status == 0
    assert json.loads(out[-1])["total"] == 4
    assert json.loads(err[-1]) == {"delivered": 4, "filtered": 0, "lost": 0, "sites": 1}
    assert server.asked("UnsubscribeRequest")


def test_what_is_left_of_an_interval_at_the_end_has_no_table(server: FakeServer, top: Start) -> None:
    """Its rates would be of a moment. What fired in it is in the summary."""
    server.count((BINARY, 4711, "postgres", 3), seconds=1)
    server.count((BINARY, 4711, "postgres", 1900), seconds=0.01)
    server.end(pb.End.REASON_UNSUBSCRIBED)
    status, out, err = finish(top("postgresql:*"))
    assert status == 0
    assert [line.split()[3] for line in out if line.startswith("stapsdt top")] == ["3.0"]
    assert err == ["stapsdt: 1903 events delivered, 0 filtered, 0 lost, 1 site"]


def test_pipe_gets_plain_frames(server: FakeServer, top: Start) -> None:
    server.sites = [armed(), armed(2, pb.SiteStatus.STATE_REFUSED, "no room")]
    server.count((BINARY, 4711, "ev\x1bil", 3))
    server.lose(5)
    server.count()
    server.count()
    process = top("postgresql:*", "--interval", "0.2")
    assert process.stdout is not None
    lines = (line.rstrip("\n") for line in process.stdout)
    out = [next(lines)]
    while "LOST: 5 in queue (0 of them now)" not in out:
        out.append(next(lines))
    process.send_signal(signal.SIGINT)
    out += lines
    status, _, err = finish(process)
    assert status == 0
    assert all(line.isprintable() for line in out)
    assert [line.startswith("stapsdt top  ") for line in out].count(True) >= 2
    assert any(line.endswith("postgresql:query__start  postgres") for line in out)
    assert any(line.endswith(r"4711  ev\x1bil") for line in out)
    assert "LOST: 5 in queue (0 of them now)" in out
    assert out[0].endswith("1 site, 1 refused")
    assert err == ["stapsdt: 3 events delivered, 0 filtered, 5 lost (5 events in queue), 1 site"]


def test_terminal_of_80_by_24(server: FakeServer, top: Start) -> None:
    server.count((BINARY, 4711, "postgres", 3))
    server.count()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    try:
        process = top("--count", "2", "--interval", "0.1", stdout=theirs, env=environment | {"TERM": "xterm"})
        os.close(theirs)
        shown = b""
        while b"\x1b[?25h" not in shown:
            shown += os.read(ours, 4096)
        assert process.wait(20) == 0
    finally:
        os.close(ours)
    frames = shown.decode().split("\x1b[H")[2:]
    assert len(frames) == 2
    for each in frames:
        lines = each.partition("\x1b[J")[0].split("\x1b[K\r\n")
        assert len(lines) < 24
        assert max(map(len, lines)) <= 80 + len("\x1b[2m\x1b[0m")
    assert "postgresql:query__start" in frames[1]


def test_a_reader_that_leaves_ends_it_quietly(server: FakeServer, top: Start) -> None:
    process = top("postgresql:*", "--interval", "0.1")
    assert process.stdout is not None
    server.count()
    process.stdout.readline()
    process.stdout.close()
    server.count()
    assert process.wait(20) == 0
    assert process.stderr is not None
    assert process.stderr.read() == "stapsdt: 0 events delivered, 0 filtered, 0 lost, 1 site\n"
    assert server.asked("UnsubscribeRequest")


def test_a_stream_that_breaks_goes_on(server: FakeServer, top: Start) -> None:
    server.count((BINARY, 4711, "postgres", 2))
    server.break_after = 2
    process = top("postgresql:*", "--json", "--interval", "0.1")
    assert process.stderr is not None
    told = json.loads(process.stderr.readline())
    assert (told["interrupted"] != "", told["retrying_seconds"]) == (True, RESTART_SECONDS)
    server.count((BINARY, 4711, "postgres", 1))
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["total"] < 3:
        pass
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0


def test_an_end_that_nobody_asked_for_is_a_failure(server: FakeServer, top: Start) -> None:
    server.count((BINARY, 4711, "postgres", 1))
    server.end(pb.End.REASON_SERVER_STOPPING)
    status, out, err = finish(top("postgresql:*", "--json", "--no-retry"))
    assert status == 1
    assert json.loads(out[-1])["total"] == 1
    assert err[0] == "stapsdt: the server stopped: run the command again once it is back"
    assert json.loads(err[1])["delivered"] == 1


def test_wrong_usage(server: FakeServer, top: Start) -> None:
    assert finish(top("--interval", "0"))[0] == 2
    server.refuse = bad_request("selectors[0]", "a colon is missing")
    assert finish(top("x")) == (2, [], ["stapsdt: selectors: a colon is missing"])
