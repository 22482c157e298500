"""`stapsdt` list, watch, info, doctor and its errors, run in this process against a server on a real socket."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from stapsdtd.cli import stapsdt
from stapsdtd.client import AsyncClient
from stapsdtd.kernel import features
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.commands import starting
from tests.api.fake_server import FakeServer, bad_request, probe, serving
from tests.support import COMMANDS

Run = Callable[..., tuple[int, str, str]]
MAY = "; run 'stapsdt info' to see your rights"
WHY_CLOSED = "it is stopping, has no role for this user, or has too many connections; see its log"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture
def run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; answers its exit code, standard output and standard error."""

    def call(*arguments: str, target: str = server.target) -> tuple[int, str, str]:
        status = stapsdt.run(["--server", target, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_failure(server: FakeServer, closed: str) -> None:
    command = f'exec "$0" --server {server.target} list {closed}'
    done = subprocess.run(["sh", "-c", command, COMMANDS / "stapsdt"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("query__start" in done.stdout) == (">&-" not in closed.split())


def test_list_json(server: FakeServer, run: Run) -> None:
    server.listing.probes.add().CopyFrom(probe(name="bare", build_id="", sites=[pb.Site(offset=7)]))
    status, out, err = run("list", "postgresql:*", "--pid", "4711", "--json")
    assert (status, err) == (0, "")
    assert server.asked("ListProbesRequest") == [
        pb.ListProbesRequest(selectors=["postgresql:*"], pids=[4711], problems=True, moved=True)
    ]
    first, bare = map(json.loads, out.splitlines())
    assert first == {
        "provider": "postgresql",
        "name": "query__start",
        "selector": '"postgresql":"/usr/bin/postgres"::"query__start"',
        "path": "/usr/bin/postgres",
        "build_id": "c0ffee",
        "pids": [4711],
        "sites": [
            {
                "offset": 0x1234,
                "semaphore_offset": 0x5678,
                "function": "exec_simple_query",
                "args": [
                    {
                        "text": "8@%rdi",
                        "size": 8,
                        "signed": False,
                        "float": False,
                        "kind": "register",
                        "name": "rdi",
                        "first_bit": 0,
                    },
                    {
                        "text": "-4@-20(%rbp)",
                        "size": 4,
                        "signed": True,
                        "float": False,
                        "kind": "memory",
                        "base": "rbp",
                        "displacement": -20,
                    },
                ],
            }
        ],
    }
    assert bare["build_id"] is None
    assert bare["sites"] == [{"offset": 7, "semaphore_offset": None, "function": None, "args": []}]


def test_list_says_what_cannot_be_armed(server: FakeServer, run: Run) -> None:
    sites = [pb.Site(offset=7, refused="it would kill"), pb.Site(offset=8), pb.Site(offset=9, refused="it would kill")]
    server.listing = pb.ListProbesResponse(probes=[probe(sites=sites)])
    status, out, err = run("list", "--json")
    assert status == 0
    told = "cannot be armed here: it would kill: postgresql:query__start at /usr/bin/postgres+0x7 and 1 more"
    assert err == f"stapsdt: {told}\n"
    assert [site.get("refused") for site in json.loads(out)["sites"]] == ["it would kill", None, "it would kill"]


def contained(server: FakeServer) -> None:
    """The probe that is listed is mapped in a container, in a namespace without a container, and elsewhere."""
    server.listing = pb.ListProbesResponse(probes=[probe(pids=[4711, 4712, 4713, 4714])])
    add = server.listing.processes.add
    add(pid=4711, comm="postgres", user="999", cgroup=f"/docker/{'c0ffee01' * 8}", container_id="c0ffee01" * 8)
    server.listing.processes[0].namespace_pid = 7
    server.listing.processes[0].container_name = "shop/db"
    add(pid=4712, comm="web", user="root", cgroup="/lxc.payload.web", container_id="web", namespace_pid=4712)
    add(pid=4713, comm="sandboxed", user="root", cgroup="/", namespace_pid=2)
    add(pid=4714, comm="\x1b", user="root", cgroup="/", namespace_pid=4714)


def test_list_json_with_details(server: FakeServer, run: Run) -> None:
    contained(server)
    status, out, err = run("list", "--json", "--details", "--container", "web", "--cgroup", "/a")
    assert (status, err) == (0, "")
    request = pb.ListProbesRequest(containers=["web"], cgroups=["/a"], details=True, problems=True, moved=True)
    assert server.asked("ListProbesRequest") == [request]
    first, _, third, _ = json.loads(out)["processes"]
    assert first == {
        "pid": 4711,
        "namespace_pid": 7,
        "comm": "postgres",
        "user": "999",
        "container": "c0ffee01" * 8,
        "container_name": "shop/db",
        "cgroup": f"/docker/{'c0ffee01' * 8}",
    }
    assert (third["container"], third["container_name"], third["cgroup"]) == (None, None, "/")


def test_list_on_a_terminal_tells_containers(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    contained(server)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, out, _ = run("list")
    assert (
        "mapped by postgres (4711, 7 in container shop/db), web (4712, 4712 in container web), "
        "sandboxed (4713, 2 in its namespace), \\x1b (4714)"
    ) in out


def test_list_on_a_terminal(server: FakeServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    server.listing.probes.add().CopyFrom(probe(name="bare", sites=[pb.Site(offset=7), pb.Site(offset=8)]))
    _, out, _ = run("list")
    assert out.splitlines() == [
        "/usr/bin/postgres",
        "  mapped by 4711",
        "  PROBE                    SITES  SEMAPHORE  ARGUMENTS",
        "  postgresql:bare              2  no",
        "  postgresql:query__start      1  yes        uint64 int32",
    ]


def test_list_with_details_for_people(server: FakeServer, run: Run) -> None:
    contained(server)
    site = pb.Site(offset=7, refused="it would kill")
    server.listing.probes[0].sites.append(site)
    _, out, _ = run("list", "--details")
    assert out.splitlines() == [
        "/usr/bin/postgres",
        "  PID       USER  COMMAND    CONTAINER               CGROUP",
        f"  4711 (7)  999   postgres   shop/db (c0ffee01c0ff)  /docker/{'c0ffee01' * 8}",
        "  4712      root  web        web                     /lxc.payload.web",
        "  4713 (2)  root  sandboxed  -                       /",
        r"  4714      root  \x1b       -                       /",
        "  PROBE                    SITES  SEMAPHORE  ARGUMENTS",
        "  postgresql:query__start      2  yes        uint64 int32",
        "      its signature is not used: the probe has 2 arguments, and the signature 1",
        "      0x1234  exec_simple_query  8@%rdi -4@-20(%rbp)",
        "      0x7  cannot be armed: it would kill",
    ]


def test_list_in_dtraces_columns(server: FakeServer, run: Run) -> None:
    sites = [pb.Site(offset=9, function="b"), pb.Site(offset=8, function="a"), pb.Site(offset=7, function="b")]
    server.listing.probes.add().CopyFrom(probe(name="no__\x1b", pids=[1, 2], sites=sites))
    status, out, _ = run("list", "-l")
    assert status == 0
    assert out.splitlines() == [
        "   ID   PROVIDER            MODULE                          FUNCTION NAME",
        "    1 postgresql4711          postgres                 exec_simple_query query-start",
        r"    2 postgresql1          postgres                                 a no-\x1b",
        r"    3 postgresql1          postgres                                 b no-\x1b",
        r"    4 postgresql2          postgres                                 a no-\x1b",
        r"    5 postgresql2          postgres                                 b no-\x1b",
    ]


def test_list_in_dtraces_columns_with_types(server: FakeServer, run: Run) -> None:
    server.listing.probes.add().CopyFrom(probe(name="bare", pids=[], sites=[pb.Site(offset=7)]))
    _, out, _ = run("list", "-v")
    assert out.splitlines()[1:] == [
        "    1 postgresql4711          postgres                 exec_simple_query query-start",
        "",
        "\tArgument Types",
        "\t\targs[0]: uint64",
        "\t\targs[1]: int32",
        "",
        "    2 postgresql          postgres                                   bare",
        "",
        "\tArgument Types",
        "\t\tNone",
        "",
    ]


def test_list_in_a_pipe_is_one_line_a_probe_however_long(server: FakeServer, run: Run) -> None:
    path = "/long" * 100 + "\x1b[2J"
    server.listing = pb.ListProbesResponse(probes=[probe(path=path, pids=[1, 2])])
    _, out, _ = run("list")
    shown = path.replace("\x1b", "\\x1b")
    assert out == f"postgresql:query__start\t1\tyes\t1,2\t{shown}\tuint64 int32\n"


def test_list_of_a_host_without_probes_is_no_failure(server: FakeServer, run: Run) -> None:
    server.listing = pb.ListProbesResponse()
    status, out, err = run("list")
    assert (status, out) == (0, "")
    assert err.startswith("stapsdt: no running program has static probes")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x:y"], "stapsdt: x:y: no running program has static probes yet\n"),
        (["x:y", "--json"], "stapsdt: x:y: no running program has static probes yet\n"),
        (["--pid", "7"], "stapsdt: no probe matches: run 'stapsdt list' to see all probes\n"),
    ],
)
def test_list_of_what_matches_nothing_fails(server: FakeServer, run: Run, arguments: list[str], told: str) -> None:
    server.listing = pb.ListProbesResponse()
    assert run("list", *arguments) == (1, "", told)


def test_list_prints_names_as_selectors(server: FakeServer, run: Run) -> None:
    server.listing = pb.ListProbesResponse(probes=[probe(name="a(b)"), probe("a b", "c\n"), probe("my-app", "x.y")])
    _, out, _ = run("list")
    assert [line.split("\t")[0] for line in out.splitlines()] == ['postgresql:"a(b)"', r'a b:"c\n"', "my-app:x.y"]


def test_list_tells_of_unusable_notes(server: FakeServer, run: Run) -> None:
    server.listing.problems.add(path="/bin/odd", reason="no descriptor")
    server.listing.problems.add(path="/usr/bin/postgres", provider="postgresql", name="a(b)", reason="no nop")
    server.listing.problems_left_out = 7
    told = (
        "stapsdt: cannot be used: no descriptor: a note in /bin/odd\n"
        'stapsdt: cannot be used: no nop: postgresql:"a(b)" in /usr/bin/postgres\n'
        "stapsdt: cannot be used: 7 more notes\n"
    )
    _, out, err = run("list", "--json")
    assert err == told
    nothing: dict[str, object] = {"build_id": None, "pids": [], "sites": []}
    selector = r'"postgresql":"/usr/bin/postgres"::"a(b)"'
    named = {"path": "/usr/bin/postgres", "provider": "postgresql", "name": "a(b)", "selector": selector}
    assert [json.loads(line) for line in out.splitlines()[1:]] == [
        {"path": "/bin/odd", "provider": "", "name": "", "selector": None, "unusable": "no descriptor"} | nothing,
        named | {"unusable": "no nop"} | nothing,
    ]
    _, out, err = run("list", "--details")
    assert err == told
    assert out.splitlines()[-1] == '  postgresql:"a(b)": cannot be used: no nop'


def test_list_says_why_a_probe_is_none(server: FakeServer, run: Run) -> None:
    del server.listing.probes[:]
    server.listing.problems.add(path="/bin/app", provider="app", name="hit", reason="no nop")
    told = "stapsdt: app:hit: app:hit is there, but cannot be used: no nop: a note in /bin/app\n"
    assert run("list", "app:hit") == (1, "", told)


@pytest.fixture
def watched(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A watch that the user interrupts after four messages."""
    kinds = pb.WatchProbesResponse
    server.changes = [
        kinds(change=kinds.CHANGE_ADDED, probe=probe()),
        kinds(change=kinds.CHANGE_SNAPSHOT_COMPLETE),
        kinds(change=kinds.CHANGE_ADDED, probe=probe(name="later")),
        kinds(change=kinds.CHANGE_REMOVED, probe=probe(name="later")),
    ]
    endless = AsyncClient.watch_probes

    async def interrupted(client: Any, selectors: Any, **scope: Any) -> AsyncIterator[Any]:
        left = len(server.changes)
        async for message in endless(client, selectors, **scope):
            yield message
            left -= 1
            if not left:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AsyncClient, "watch_probes", interrupted)
    return server


@pytest.mark.usefixtures("watched")
def test_watch_json(run: Run) -> None:
    status, out, err = run("watch", "--json")
    assert (status, err) == (0, "")
    changes = [json.loads(line) for line in out.splitlines()]
    assert [(each["change"], each["name"]) for each in changes] == [
        ("added", "query__start"),
        ("added", "later"),
        ("removed", "later"),
    ]
    assert changes[0]["sites"][0]["offset"] == 0x1234


def test_watch(watched: FakeServer, run: Run) -> None:
    status, out, err = run("watch", "--container", "web", "--cgroup", "/a")
    assert status == 0
    assert watched.asked("WatchProbesRequest") == [pb.WatchProbesRequest(containers=["web"], cgroups=["/a"])]
    assert [line[:2] for line in out.splitlines()] == ["+\t", "+\t", "-\t"]
    assert "1 probe now" in err


def test_watch_on_a_terminal_has_a_line_for_each_object(server: FakeServer) -> None:
    kinds = pb.WatchProbesResponse
    server.changes = [
        kinds(change=kinds.CHANGE_ADDED, probe=probe()),
        kinds(change=kinds.CHANGE_ADDED, probe=probe(name="other")),
        kinds(change=kinds.CHANGE_SNAPSHOT_COMPLETE),
    ]
    server.listing.processes.add(pid=4711, comm="postgres")
    ours, theirs = pty.openpty()
    with starting("--server", server.target) as start:
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "80"}
        process = start("watch", stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        with open(ours, encoding="utf-8", newline="\r\n") as terminal:
            heading, line, told = (terminal.readline() for _ in range(3))
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
    assert heading == "TIME         OBJECT                            PROBES  PROCESSES\r\n"
    # without the time
    assert line[10:] == "+  postgres                               2  postgres (4711)\r\n"
    assert told == "stapsdt: 2 probes now; waiting for changes, Ctrl-C stops\r\n"
    (request,) = server.asked("ListProbesRequest")
    assert request == pb.ListProbesRequest(pids=[4711], details=True)


def test_info(server: FakeServer, run: Run) -> None:
    server.subscribed = True
    server.info.features.add(name="map_files", detail="refused", remedy="give it CAP_CHECKPOINT_RESTORE")
    status, out, err = run("info")
    assert (status, err) == (0, "")
    only = "pid 4711|4712, execname psql, where arg1 > 5"
    for shown in ("1.2.3", "ftrace", "6.18 x86_64", "give it CAP_CHECKPOINT_RESTORE", "sub-1", "postgresql:*", only):
        assert shown in out
    _, out, _ = run("info", "--json")
    told = json.loads(out)
    (held,) = told["subscriptions"]
    assert (told["version"], told["engine"], held["id"]) == ("1.2.3", "ftrace", "sub-1")
    assert (held["where"], held["scope"]["execnames"]) == ("arg1 > 5", ["psql"])


@pytest.mark.parametrize(
    ("inventory", "shown"),
    [
        (pb.Inventory(state=pb.Inventory.STATE_OFF), "off"),
        (
            pb.Inventory(state=pb.Inventory.STATE_SCANNING, files=1, probes=2),
            "2 probes in 1 installed file, first scan under way",
        ),
        (
            pb.Inventory(state=pb.Inventory.STATE_FAILED, files=2, probes=1, scanned_ns=1, problem="no reply"),
            r"1 probe in 2 installed files, scanned \d+ h ago, the last scan failed: no reply",
        ),
    ],
)
def test_info_tells_of_the_inventory(server: FakeServer, run: Run, inventory: pb.Inventory, shown: str) -> None:
    server.info.inventory.CopyFrom(inventory)
    _, out, _ = run("info")
    assert re.search(rf" inventory {shown} arming ", " ".join(out.split()))
    _, out, _ = run("info", "--json")
    told = json.loads(out)["inventory"]
    assert (told["files"], told["problem"]) == (inventory.files, inventory.problem)
    assert told["state"] in {"off", "scanning", "failed"}


def test_list_installed(server: FakeServer, run: Run) -> None:
    status, out, err = run("list", "--installed", "postgresql:*")
    assert (status, err) == (0, "")
    assert out
    (request,) = server.asked("ListProbesRequest")
    assert request == pb.ListProbesRequest(
        selectors=["postgresql:*"], installed=True, details=True, problems=True, moved=True
    )
    server.listing.files_left_out = 1
    assert run("list", "--installed")[2] == "stapsdt: 1 installed file left out: narrow it with a selector\n"


@pytest.mark.parametrize(
    ("state", "arguments", "told"),
    [
        ("SCANNING", ["a:b"], (1, "installed files are still being scanned: try again in some seconds")),
        ("CURRENT", [], (0, "no installed file has static probes")),
        ("CURRENT", ["a:b"], (1, "a:b: no installed file has static probes yet")),
        (
            "CURRENT",
            ["--pid", "1"],
            (1, "no probe matches: run 'stapsdt list --installed' to see all probes in installed files"),
        ),
    ],
)
def test_why_nothing_is_installed(
    server: FakeServer, run: Run, state: str, arguments: list[str], told: tuple[int, str]
) -> None:
    server.info.inventory.state = pb.Inventory.State.Value(f"STATE_{state}")
    server.listing.Clear()
    status, _, err = run("list", "--installed", *arguments)
    assert (status, err) == (told[0], f"stapsdt: {told[1]}\n")


def test_installed_or_named_files(run: Run) -> None:
    status, _, err = run("list", "--installed", "--file", "/usr/bin/postgres")
    assert (status, "--installed cannot be combined with --file" in err) == (2, True)


@pytest.fixture
def local_features(monkeypatch: pytest.MonkeyPatch) -> list[features.Feature]:
    found = [
        features.Feature("tracefs", available=False, required=True, detail="not mounted", remedy="mount it"),
        features.Feature("map_files", available=True, required=False, detail="readable", remedy=""),
    ]
    monkeypatch.setattr(features, "probe_features", lambda: found)
    return found


@pytest.mark.usefixtures("local_features")
def test_doctor_without_a_server(run: Run) -> None:
    status, out, _ = run("doctor", target="unix:/nowhere/sock")
    assert status == 1
    assert "MISSING  tracefs: not mounted\n         mount it\n" in out
    assert "missing  server: cannot connect to unix:/nowhere/sock\n         start the server with" in out
    assert "ok       map_files: readable\n" in out


@pytest.mark.usefixtures("local_features")
def test_doctor_tells_of_a_failed_inventory(server: FakeServer, run: Run) -> None:
    server.info.features.add(name="tracefs", available=True, required=True, detail="at /sys/kernel/tracing")
    server.info.inventory.state = pb.Inventory.STATE_CURRENT
    assert "inventory" not in run("doctor")[1]
    server.info.inventory.CopyFrom(pb.Inventory(state=pb.Inventory.STATE_FAILED, problem="no reply"))
    status, out, _ = run("doctor")
    assert status == 0
    assert "missing  inventory: installed files cannot be looked for: no reply\n" in out


@pytest.mark.usefixtures("local_features")
def test_doctor_believes_the_server(server: FakeServer, run: Run) -> None:
    server.info.features.add(name="tracefs", available=True, required=True, detail="at /sys/kernel/tracing")
    server.info.features.add(name="bpf", available=False, detail="no BTF")
    status, out, _ = run("doctor", "--json")
    checks = {each["name"]: each for each in map(json.loads, out.splitlines())}
    assert status == 0
    assert checks["server"]["available"]
    assert checks["tracefs"] == {
        "name": "tracefs",
        "available": True,
        "required": True,
        "detail": "at /sys/kernel/tracing",
        "remedy": "",
    }
    assert not checks["bpf"]["required"]


def test_nobody_answers(run: Run) -> None:
    status, out, err = run("list", target="unix:/nowhere/sock")
    start = "start the server with 'systemctl start stapsdtd' or 'stapsdtd --listen unix:/nowhere/sock'"
    assert (status, out, err) == (1, "", f"stapsdt: cannot connect to unix:/nowhere/sock: {start}\n")


def test_a_bad_selector_is_wrong_usage(server: FakeServer, run: Run) -> None:
    server.refuse = bad_request("selectors[0]", "a colon is\nmissing")
    assert run("list", "abc") == (2, "", "stapsdt: selectors: a colon is\\nmissing\n")


def test_another_failure_is_one_line(server: FakeServer, run: Run) -> None:
    server.refuse = (grpc.StatusCode.INTERNAL, "out of luck")
    assert run("info") == (1, "", f"stapsdt: get server info: {server.target} failed (out of luck): see its log\n")


@pytest.mark.parametrize(
    ("code", "details", "told"),
    [
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            "list probes: TARGET did not answer within 60 s: it may be busy; try again, or see its log",
        ),
        (
            grpc.StatusCode.CANCELLED,
            "CANCELLED",
            "list probes: TARGET cancelled the request, as it does when it stops: try again",
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "uid 7 makes too many requests; try again later",
            f"list probes: uid 7 makes too many requests; try again later{MAY}",
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "message larger than max (5 vs. 4)",
            f"list probes: too much for one message: ask for fewer probes{MAY}",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "Socket closed",
            f"TARGET closed the connection: {WHY_CLOSED}",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "the server is stopping",
            "TARGET is stopping: try again after it has restarted",
        ),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            "Method not found!",
            "list probes: TARGET is older than this client and cannot do this: upgrade it",
        ),
        (grpc.StatusCode.UNKNOWN, "", "list probes: TARGET failed: see its log"),
        (grpc.StatusCode.NOT_FOUND, "no container 'web' runs", "no container 'web' runs"),
    ],
)
def test_errors_say_what_failed_and_what_to_do(
    server: FakeServer, run: Run, code: grpc.StatusCode, details: str, told: str
) -> None:
    server.refuse = (code, details)
    assert run("list") == (1, "", f"stapsdt: {told.replace('TARGET', server.target)}\n")


@pytest.mark.parametrize("arguments", [["list"], ["watch"], ["trace", "a:b"], ["count", "a:b"], ["info"], ["top"]])
@pytest.mark.parametrize(
    "code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNKNOWN, grpc.StatusCode.PERMISSION_DENIED]
)
def test_texts_of_the_server_reach_no_terminal_as_they_are(
    server: FakeServer, run: Run, code: grpc.StatusCode, arguments: list[str]
) -> None:
    server.refuse = (code, "no \x1b]0;PWNED\x07\x1b[7m\x9b7m\u202e\r\nstapsdt: forged [bold red]x[/]")
    status, out, err = run(*arguments)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()
    assert r"no \x1b]0;PWNED\x07\x1b[7m\x9b7m\u202e\r\nstapsdt: forged [bold red]x[/]" in err


def test_trace_that_is_refused_names_its_selectors(server: FakeServer, run: Run) -> None:
    server.refuse = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    told = f"stapsdt: subscribe to a:b c:d: {server.target} did not answer within 60 s: it may be busy; try again"
    assert run("trace", "a:b", "c:d") == (1, "", f"{told}, or see its log\n")


@pytest.mark.usefixtures("local_features")
def test_doctor_tells_what_to_do_about_a_server_that_is_slow(server: FakeServer, run: Run) -> None:
    server.refuse = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    _, out, _ = run("doctor")
    problem = f"missing  server: get server info: {server.target} did not answer within 5 s\n"
    assert f"{problem}         it may be busy; try again" in out
