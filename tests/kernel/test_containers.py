"""Processes in containers, as engines make them: cgroups with telling names, namespaces, overlays."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.client import Client, Event, Process, RequestFailedError, SiteState, SubscribeOptions
from stapsdtd.kernel.tracefs import Tracefs
from tests.kernel.conftest import SharedDaemons
from tests.support import TICKER, Daemon, Recorder, Ticker, require, running_daemon, stapsdt, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel


class Cgroup:
    """A cgroup of the unified hierarchy, made with all above it."""

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self.directory = root / path.lstrip("/")
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        return self.directory.name

    def take(self, pid: int) -> None:
        (self.directory / "cgroup.procs").write_text(str(pid))

    def run(self, *command: Path | str) -> Ticker:
        """A ticker that is born here."""
        return Ticker("sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', self.directory, *command)


class Contained:
    """A ticker of its own on an overlay, in pid, mount and user namespaces of its own."""

    def __init__(self, cgroup: Cgroup, folder: Path, lower: Path) -> None:
        for name in ("upper", "work", "merged"):
            (folder / name).mkdir(parents=True)
        layers = f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}"
        self.program = folder / "merged" / "ticker"
        script = f"mount -t overlay -o '{layers}' none '{folder}/merged' && exec '{self.program}'"
        namespaces = ("--pid", "--mount", "--user", "--map-root-user", "--fork", "--kill-child")
        self.ticker = cgroup.run("unshare", *namespaces, "sh", "-c", script)
        outer = self.ticker.pid
        (self.pid,) = map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split())


@pytest.fixture
def hierarchy() -> Iterator[Path]:
    """A cgroup for this test alone. It is removed with all below it, when nobody is there any more."""
    roots = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line]
    require(roots, "cgroup2")
    outermost = Path(roots[0]) / f"stapsdtd_test_{os.getpid()}"
    outermost.mkdir()
    try:
        yield Path(roots[0])
    finally:
        wait_for(lambda: "populated 0" in (outermost / "cgroup.events").read_text(), "all to have left")
        for directory, _, _ in os.walk(outermost, topdown=False):
            os.rmdir(directory)


@pytest.fixture
def container(hierarchy: Path) -> Cgroup:
    return Cgroup(hierarchy, f"/stapsdtd_test_{os.getpid()}/docker/{secrets.token_hex(32)}")


@pytest.fixture
def lower(tmp_path: Path, ticker_program: Path) -> Path:
    folder = tmp_path / "lower"
    folder.mkdir()
    shutil.copy(ticker_program, folder / "ticker")
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Nobody can tell what an overlay lies on that a user namespace mounted."""
    path = tmp_path_factory.mktemp("settings") / "stapsdtd.toml"
    path.write_text('[filesystems]\narm = ["overlay"]\n')
    return "--config", str(path)


@pytest.fixture(scope="module")
def shared_daemons(
    tmp_path_factory: pytest.TempPathFactory, tracefs: Tracefs, settings: tuple[str, str]
) -> Iterator[SharedDaemons]:
    with closing(SharedDaemons(tmp_path_factory.mktemp("daemons"), tracefs, *settings)) as daemons:
        yield daemons


@pytest.fixture
def contained(container: Cgroup, tmp_path: Path, lower: Path) -> Iterator[Contained]:
    made = Contained(container, tmp_path / "contained", lower)
    with made.ticker:
        yield made


@pytest.fixture
def bpf_only(engine: str) -> None:
    if engine != "bpf":
        pytest.skip("only the bpf engine knows cgroups")


@pytest.fixture
def ftrace_only(engine: str) -> None:
    if engine != "ftrace":
        pytest.skip("the other engine knows cgroups")


def test_process_is_listed_with_its_container(daemon: Daemon, container: Cgroup, contained: Contained) -> None:
    with Client(daemon.target) as client:
        (probe,) = client.list_probes(f"{TICKER}:ticker::tick", containers=[container.name])
        assert (probe.pids, probe.path) == ((contained.pid,), str(contained.program))
        listing = client.list_probes(f"{TICKER}:ticker::tick", [contained.pid], details=True)
    (process,) = (each for each in listing.processes if each.pid == contained.pid)
    expected = (contained.pid, "ticker", 1, container.path, container.name)
    assert shown(process) == expected
    listed = stapsdt(
        daemon.target, "list", f"{TICKER}:ticker::tick", "--container", container.name[:12], "--json", "--details"
    )
    (told,) = json.loads(listed.stdout)["processes"]
    assert told == {
        "pid": contained.pid,
        "namespace_pid": 1,
        "comm": "ticker",
        "user": "root",
        "container": container.name,
        "container_name": None,
        "cgroup": container.path,
    }


def shown(process: Process) -> tuple[object, ...]:
    return process.pid, process.comm, process.namespace_pid, process.cgroup, process.container_id


def test_process_outside_of_containers(daemon: Daemon, ticker: Ticker, contained: Contained) -> None:
    with Client(daemon.target) as client:
        listing = client.list_probes(f"{TICKER}:ticker::tick", [ticker.pid, contained.pid], details=True)
    (process,) = (each for each in listing.processes if each.pid == ticker.pid)
    assert (process.container_id, process.namespace_pid) == (None, ticker.pid)
    assert process.cgroup == Path(f"/proc/{ticker.pid}/cgroup").read_text().partition("0::")[2].splitlines()[0]


@pytest.mark.usefixtures("bpf_only")
def test_events_are_those_of_the_container(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, container: Cgroup, contained: Contained
) -> None:
    below = Cgroup(container.directory, "init.scope")
    with (
        Ticker(ticker_program) as moved,
        Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", containers=[container.name[:12]]) as recorder,
    ):
        contained.ticker.do("fire 3")
        ticker.do("fire 5")
        moved.do("fire 5")
        container.take(moved.pid)
        moved.do("fire 2")
        with below.run(ticker_program) as later:
            later.do("fire 4")
        ticker.do("fire 5")
    fired = [event.pid for event in recorder.events]
    assert {pid: fired.count(pid) for pid in set(fired)} == {contained.pid: 3, moved.pid: 2, later.pid: 4}
    account = recorder.finish()
    assert (account.delivered, account.lost) == (9, 0)
    assert account.filtered >= 15


@pytest.fixture
def daemon_inside(tmp_path: Path, engine: str, hierarchy: Path, settings: tuple[str, str]) -> Iterator[Daemon]:
    """Its cgroup namespace shows others' cgroups by how far away they are; the host's hierarchy is mounted there."""
    own = Cgroup(hierarchy, f"/stapsdtd_test_{os.getpid()}/pods/{secrets.token_hex(32)}")
    join = ("sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec unshare --cgroup "$@"', str(own.directory))
    with running_daemon(tmp_path, "--engine", engine, *settings, prefix=join) as started:
        yield started


def test_daemon_in_a_container_of_its_own(
    daemon_inside: Daemon, engine: str, container: Cgroup, contained: Contained, ticker: Ticker
) -> None:
    there = ("nsenter", "--cgroup", f"--target={daemon_inside.pid}")
    lines = subprocess.run([*there, "cat", f"/proc/{contained.pid}/cgroup"], capture_output=True, check=True).stdout
    assert f"0::/../../docker/{container.name}".encode() in lines.splitlines()
    with Client(daemon_inside.target) as client:
        listing = client.list_probes(f"{TICKER}:ticker::tick", containers=[container.name[:12]], details=True)
        (process,) = listing.processes
        assert shown(process)[-2:] == (container.path, container.name)
        listing = client.list_probes(f"{TICKER}:ticker::tick", cgroups=[container.path], details=True)
        assert [each.pid for each in listing.processes] == [contained.pid]
    if engine == "bpf":
        with Recorder(daemon_inside.target, f"{TICKER}:ticker::tick(arg0)", containers=[container.name]) as recorder:
            contained.ticker.do("fire 3")
            ticker.do("fire 5")
        assert [event.pid for event in recorder.events] == [contained.pid] * 3


FIELDS = ("container", "cgroup", "uid", "gid")


def fields_of(event: Event) -> dict[str, object]:
    return dict(zip(FIELDS, event.values[-len(FIELDS) :], strict=True))


@pytest.mark.usefixtures("bpf_only")
def test_events_tell_user_and_container(
    daemon: Daemon, container: Cgroup, contained: Contained, ticker: Ticker, ticker_program: Path
) -> None:
    """As of the moment of the hit, also if the process moves or ends."""
    as_user = ("setpriv", "--reuid=12345", "--regid=23456", "--clear-groups")
    with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", fields=FIELDS) as recorder:
        contained.ticker.do("fire 1")
        with Ticker(*as_user, ticker_program) as other:
            other.do("fire 1")
            container.take(other.pid)
            other.do("fire 1")
            other_pid = other.pid
        ticker.do("fire 1")
    outside = Path(f"/proc/{ticker.pid}/cgroup").read_text().partition("0::")[2].splitlines()[0]
    by_pid: dict[int, list[dict[str, object]]] = {}
    for event in recorder.events:
        by_pid.setdefault(event.pid, []).append(fields_of(event))
        assert event.values[: -len(FIELDS)] == (0,)
    inside = {"container": container.name, "cgroup": container.path}
    assert by_pid == {
        contained.pid: [{**inside, "uid": 0, "gid": 0}],
        other_pid: [
            {"container": "", "cgroup": outside, "uid": 12345, "gid": 23456},
            {**inside, "uid": 12345, "gid": 23456},
        ],
        ticker.pid: [{"container": "", "cgroup": outside, "uid": 0, "gid": 0}],
    }


@pytest.mark.usefixtures("ftrace_only")
def test_what_the_engine_cannot_tell_has_a_reason(daemon: Daemon, ticker: Ticker) -> None:
    with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", fields=FIELDS) as recorder:
        ticker.do("fire 1")
    (event,) = recorder.events
    assert event.values == (0, None, None, None, None)
    assert event.unavailable == {at: f"the ftrace engine cannot capture {name}" for at, name in enumerate(FIELDS, 1)}


def test_unknown_field_is_refused(daemon: Daemon) -> None:
    with Client(daemon.target) as client, pytest.raises(RequestFailedError, match="gids"):
        client.subscribe("*:*", SubscribeOptions(fields=["uid", "gids"]))


@pytest.mark.usefixtures("bpf_only")
def test_overlay_that_appears_later_is_traced_too(
    daemon: Daemon, container: Cgroup, tmp_path: Path, lower: Path, ticker: Ticker
) -> None:
    with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", containers=[container.name]) as recorder:
        later = Contained(container, tmp_path / "later", lower)
        with later.ticker:
            wait_for(lambda: any(each.path == str(later.program) for each in recorder.armed()), "the overlay's file")
            later.ticker.do("fire 4")
            ticker.do("fire 5")
    assert [event.pid for event in recorder.events] == [later.pid] * 4
    assert {event.probe.path for event in recorder.events} == {str(later.program)}


@pytest.mark.usefixtures("bpf_only")
def test_all_cgroups_of_one_container_count(
    daemon: Daemon, hierarchy: Path, container: Cgroup, ticker_program: Path
) -> None:
    scope = Cgroup(hierarchy, f"/stapsdtd_test_{os.getpid()}/docker-{container.name}.scope")
    with (
        container.run(ticker_program) as first,
        scope.run(ticker_program) as second,
        Recorder(daemon.target, f"{TICKER}:ticker::tick", containers=[container.name]) as recorder,
    ):
        first.do("fire 1")
        second.do("fire 1")
    assert sorted(event.pid for event in recorder.events) == sorted([first.pid, second.pid])


@pytest.mark.usefixtures("bpf_only")
def test_trace_command(
    daemon: Daemon, ticker: Ticker, hierarchy: Path, contained: Contained, container: Cgroup
) -> None:
    named = Cgroup(hierarchy, f"/stapsdtd_test_{os.getpid()}/lxc.payload.web-{os.getpid()}")
    arguments = (
        "trace",
        f"{TICKER}:ticker::tick",
        "--container",
        container.name,
        "--container",
        named.name[len("lxc.payload.") :],
    )
    with subprocess.Popen(
        stapsdt_command(daemon.target, *arguments, "--count", "2", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as tracing:
        with Client(daemon.target) as client:
            wait_for(lambda: any(held.streaming for held in client.subscriptions()), "the trace")
            (held,) = client.subscriptions()
            assert held.scope.containers == (container.name, f"web-{os.getpid()}")
        assert f"container {container.name}|web-{os.getpid()}" in " ".join(
            stapsdt(daemon.target, "info").stdout.split()
        )
        ticker.do("fire 5")
        contained.ticker.do("fire 2")
        events = [json.loads(line) for line in tracing.communicate(timeout=30)[0].splitlines()]
    assert [event["pid"] for event in events] == [contained.pid] * 2
    assert tracing.returncode == 0


def test_watch_tells_who_joins(daemon: Daemon, container: Cgroup, contained: Contained, ticker_program: Path) -> None:
    command = stapsdt_command(daemon.target, "watch", f"{TICKER}:ticker::tick", "--container", container.name, "--json")
    with Ticker(ticker_program) as moved, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            first = json.loads(watching.stdout.readline())
            assert (first["change"], first["path"], first["pids"]) == ("added", str(contained.program), [contained.pid])
            container.take(moved.pid)
            joined = json.loads(watching.stdout.readline())
            assert (joined["change"], joined["path"], joined["pids"]) == ("added", str(ticker_program), [moved.pid])
            moved.kill()
            left = json.loads(watching.stdout.readline())
            assert (left["change"], left["path"]) == ("removed", str(ticker_program))
        finally:
            watching.terminate()


def test_what_is_no_one_container_is_told(daemon: Daemon, hierarchy: Path, container: Cgroup) -> None:
    other = Cgroup(hierarchy, f"/stapsdtd_test_{os.getpid()}/docker/{container.name[:12]}{secrets.token_hex(26)}")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(container.name, other.name, strict=True))))
    for command in ("list", "watch", "trace"):
        ambiguous = stapsdt(daemon.target, command, ":", "--container", container.name[:shared], check=False)
        assert ambiguous.returncode == 2
        first, second = sorted([container.name, other.name])
        assert ambiguous.stderr == (
            f"stapsdt: --container: '{container.name[:shared]}' matches {first} and {second}; write more of it\n"
        )
        nobody = stapsdt(daemon.target, command, ":", "--container", container.name[:11], check=False)
        assert nobody.returncode == 2
        assert "--container: no cgroup of the unified hierarchy is named after a container" in nobody.stderr


@pytest.mark.usefixtures("ftrace_only")
@pytest.mark.parametrize("kind", ["containers", "cgroups"])
def test_ftrace_refuses_what_it_does_not_know(
    daemon: Daemon, ticker: Ticker, ticker_program: Path, container: Cgroup, kind: str
) -> None:
    scope: dict[str, Any] = {kind: [container.name if kind == "containers" else container.path]}
    recorder = Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick", **scope)
    ticker.do("fire 2")
    (status,) = recorder.sites
    assert status.state is SiteState.REFUSED
    assert "the ftrace engine cannot filter by cgroup" in status.reason
    assert recorder.finish().fired == 0
