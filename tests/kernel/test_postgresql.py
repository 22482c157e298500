"""A throw-away cluster of the host's PostgreSQL, on a unix socket only, run by an unprivileged user."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from stapsdtd.client import Aggregate, Client, Event, Span, SubscribeOptions, Unavailable
from tests.support import (
    Daemon,
    Recorder,
    armed_semaphores,
    notes_in,
    require,
    semaphores,
    stapsdt,
    stapsdt_command,
    wait_for,
)

pytestmark = pytest.mark.kernel

LONG = f"SELECT length('{'x' * 2970}');"
LONG_UNICODE = f"SELECT length('{'☃' * 990}');"


class Cluster:
    """A running server. Backends are its children, one for each Session."""

    def __init__(self, programs: Path, folder: Path, user: pwd.struct_passwd, *more: str) -> None:
        """more: settings."""
        self.programs = programs
        self.folder = folder
        # the server refuses to run as root
        as_user: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": folder}
        data = folder / "data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            **as_user,
        )
        settings = (
            "listen_addresses=",
            "fsync=off",
            "autovacuum=off",
            "checkpoint_timeout=1h",
            "max_connections=30",
            *more,
        )
        log = folder / "log"
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", folder, *(f"--{setting}" for setting in settings)],
                stderr=errors,
                **as_user,
            )
        self.pid = self._process.pid

        def answers() -> bool:
            assert self._process.poll() is None, log.read_text()
            return subprocess.run([programs / "pg_isready", "-q", "-h", folder], check=False).returncode == 0

        wait_for(answers, "PostgreSQL to answer")

    @property
    def path(self) -> str:
        return os.readlink(f"/proc/{self.pid}/exe")

    def stop(self) -> None:
        # fast shutdown: clients are not waited for
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)


class Session:
    """psql, one connection; sent has every statement since `forget`."""

    def __init__(self, cluster: Cluster) -> None:
        self._process = subprocess.Popen(
            [cluster.programs / "psql", "-XqAt", "-h", cluster.folder, "-U", "postgres", "-d", "postgres"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self.sent: list[str] = []
        self.pid = int(self.do("SELECT pg_backend_pid();")[0])

    def begin(self, *statements: str) -> None:
        assert self._process.stdin is not None
        for statement in statements:
            self._process.stdin.write(statement + "\n")
        self._process.stdin.write("\\echo done\n")
        self._process.stdin.flush()
        self.sent += statements

    def finish(self) -> list[str]:
        assert self._process.stdout is not None
        rows = []
        while (row := self._process.stdout.readline()) != "done\n":
            assert row, "psql ended"
            rows.append(row.rstrip("\n"))
        return rows

    def do(self, *statements: str) -> list[str]:
        self.begin(*statements)
        return self.finish()

    def forget(self) -> None:
        self.sent.clear()

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def contend(holder: Session, waiter: Session, table: str, seconds: float = 0.05) -> None:
    """Have one session wait for a table that another one has locked, for some seconds at least."""
    lock = f"LOCK TABLE {table};"
    holder.do("START TRANSACTION;", lock)
    waiter.begin("START TRANSACTION;", lock, "COMMIT;")
    waits = f"SELECT count(*) FROM pg_locks WHERE pid = {waiter.pid} AND NOT granted;"
    wait_for(lambda: holder.do(waits) == ["1"], f"a backend to wait for {table}")
    holder.do(f"SELECT pg_sleep({seconds});", "COMMIT;")
    waiter.finish()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


@contextmanager
def running_cluster(*settings: str) -> Iterator[Cluster]:
    """settings: beside those of every test."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    require(versions, "PostgreSQL")
    users = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = users.get("postgres") or users["nobody"]
    # not tmp_path: the user may not enter it
    folder = Path(tempfile.mkdtemp(prefix="stapsdtd-pg-"))
    try:
        os.chown(folder, user.pw_uid, user.pw_gid)
        running = Cluster(versions[-1].parent, folder, user, *settings)
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(folder)


def of(events: Sequence[Event], pid: int, *names: str) -> list[Event]:
    return [event for event in events if event.pid == pid and event.probe.name in names]


def test_statements_of_several_connections_are_told_in_order(daemon: Daemon, cluster: Cluster) -> None:
    with ExitStack() as stack:
        earlier = [stack.enter_context(Session(cluster)) for _ in range(3)]
        for session in earlier:
            session.forget()
        with Recorder(daemon.target, "postgresql:query__start(arg0:str)", kernel_buffer_kib=16384) as recorder:
            later = [stack.enter_context(Session(cluster)) for _ in range(3)]
            sessions = earlier + later
            for number, session in enumerate(sessions):
                plain = [f"SELECT {number}, {count}, 'naïve ☃';" for count in range(100)]
                session.begin(*plain[:50], LONG, "SELECT\n\t1;", LONG_UNICODE, *plain[50:])
            for session in sessions:
                session.finish()
        told = {session.pid: of(recorder.events, session.pid, "query__start") for session in sessions}
        assert [[event.values[0] for event in told[session.pid]] for session in sessions] == [
            session.sent for session in sessions
        ]
        assert len(recorder.events) == sum(map(len, told.values())) == 3 * 103 + 3 * 104
        assert {event.probe.path for event in recorder.events} == {cluster.path}
        account = recorder.finish()
        assert (account.fired, account.lost) == (account.delivered, 0)


def test_how_long_statements_take_is_what_the_server_logs(daemon: Daemon, cluster: Cluster) -> None:
    statements = [f"SELECT pg_sleep({milliseconds / 1000});" for milliseconds in (50, 60, 70, 80)]
    span = Span(start_selectors=["postgresql:query__start(arg0:str)"])
    with Session(cluster) as session, Client(daemon.target) as client:
        session.do("SET log_min_duration_statement = 0;")
        options = SubscribeOptions(pids=[session.pid])
        with client.subscribe("postgresql:query__done(arg0:str)", options, span) as subscription:
            session.do(*statements)
            subscription.unsubscribe()
            pairs = [event.values for event in subscription.events()]
    assert [(end, start) for end, start, _ in pairs] == [(statement, statement) for statement in statements]
    log = (cluster.folder / "log").read_text()
    logged = re.findall(r"duration: ([\d.]+) ms  statement: SELECT pg_sleep", log)
    for (_, _, elapsed), milliseconds in zip(pairs, logged[-len(pairs) :], strict=True):
        assert isinstance(elapsed, int)
        assert elapsed == pytest.approx(float(milliseconds) * 1e6, rel=0.02)


def test_latency_by_statement_counts_those_that_were_sent(daemon: Daemon, cluster: Cluster) -> None:
    """Also where the kernel pairs and adds up: the text is an argument of the end."""
    wanted = Aggregate(functions=["count", "percentiles"], value="elapsed", by=["arg0:str"])
    span = Span(start_selectors=["postgresql:query__start"])
    with Session(cluster) as session, Client(daemon.target) as client:
        options = SubscribeOptions(pids=[session.pid])
        session.forget()
        with client.aggregate("postgresql:query__done", wanted, options, span) as subscription:
            session.do(*(f"SELECT {number % 3};" for number in range(100)))
            subscription.unsubscribe()
            (snapshot,) = subscription.snapshots()
        assert {row.key[0]: row.values["count"] for row in snapshot.rows} == Counter(session.sent)
    assert snapshot.account.spans.starts == snapshot.account.aggregated == 100


def test_statements_have_their_name_without_being_asked(daemon: Daemon, cluster: Cluster) -> None:
    with Session(cluster) as session:
        session.forget()
        command = stapsdt_command(
            daemon.target, "trace", "postgresql:query__start", "--json", "--pid", str(session.pid)
        )
        with subprocess.Popen([*command, "--count", "3"], stdout=subprocess.PIPE, text=True) as trace:
            with Client(daemon.target) as client:
                listing = client.list_probes(["postgresql:query__start"], pids=[session.pid])
            wait_for(lambda: semaphores(session.pid, listing).total() == 1, "the probe to be armed")
            session.do("SELECT 1;", "SELECT 'naïve ☃';", LONG)
            out, _ = trace.communicate(timeout=60)
    assert [json.loads(line)["named"] for line in out.splitlines()] == [{"query": sent} for sent in session.sent]


def test_a_glob_has_names_and_strings_of_each_probe(daemon: Daemon, cluster: Cluster) -> None:
    with Session(cluster) as session:
        session.forget()
        selector = "postgresql:query__*"
        command = stapsdt_command(daemon.target, "trace", selector, "--json", "--pid", str(session.pid))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trace:
            with Client(daemon.target) as client:
                listing = client.list_probes([selector], pids=[session.pid])
            probes = sum(len(probe.sites) for probe in listing)
            wait_for(lambda: semaphores(session.pid, listing).total() == probes, "the probes to be armed")
            session.do("SELECT 1;")
            trace.send_signal(signal.SIGINT)
            out, _ = trace.communicate(timeout=60)
    named = {event["name"]: event.get("named") for event in map(json.loads, out.splitlines())}
    assert {"query__start", "query__parse__start", "query__execute__start", "query__done"} <= named.keys()
    assert named["query__start"] == named["query__done"] == named["query__parse__start"] == {"query": "SELECT 1;"}
    assert not named["query__execute__start"]


def test_statements_are_counted_by_their_name(daemon: Daemon, cluster: Cluster) -> None:
    with Session(cluster) as session:
        session.forget()
        selector = "postgresql:query__start"
        options = ("--by", "query", "--where", "query != 0", "--pid", str(session.pid), "--json")
        with subprocess.Popen(
            stapsdt_command(daemon.target, "count", selector, *options), stdout=subprocess.PIPE, text=True
        ) as count:
            with Client(daemon.target) as client:
                listing = client.list_probes([selector], pids=[session.pid])
            wait_for(lambda: semaphores(session.pid, listing).total() == 1, "the probe to be armed")
            session.do(*["SELECT 1;"] * 30, *["SELECT 2;"] * 20, "SELECT 'naïve ☃';")
            count.send_signal(signal.SIGINT)
            out, _ = count.communicate(timeout=60)
    counted = {row["key"][0]: row["count"] for row in map(json.loads, out.splitlines())}
    assert counted == Counter(session.sent)


def test_what_is_known_of_it_fits_every_note(daemon: Daemon, cluster: Cluster) -> None:
    done = stapsdt(daemon.target, "list", "--json", "--details", "--file", cluster.path)
    probes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(probes) > 50
    assert not [probe["name"] for probe in probes if "signature" not in probe]


def test_statement_too_long_for_the_ring_is_delivered_or_counted(own_daemon: Daemon, cluster: Cluster) -> None:
    with Session(cluster) as session:
        with Recorder(own_daemon.target, "postgresql:query__start(arg0:str)") as recorder:
            session.do("SELECT 1;", f"SELECT length('{'x' * 4020}');", "SELECT 2;")
        account = recorder.finish()
        assert account.delivered == len(recorder.events)
        assert account.delivered + account.lost == 3


def test_queries_and_transactions_end_as_they_began(daemon: Daemon, cluster: Cluster) -> None:
    failing = "SELECT 1/0;"
    with Session(cluster) as session:
        session.forget()
        with Recorder(
            daemon.target,
            "postgresql:query__start(arg0:str)",
            "postgresql:query__done(arg0:str)",
            "postgresql:transaction__*",
        ) as recorder:
            session.do(
                "CREATE TEMPORARY TABLE numbers (n int);", *(f"INSERT INTO numbers VALUES ({n});" for n in range(50))
            )
            session.do(
                "BEGIN;",
                "SELECT sum(n) FROM numbers;",
                "COMMIT;",
                "BEGIN;",
                "DELETE FROM numbers;",
                "ROLLBACK;",
                failing,
            )
            assert session.do("SELECT count(*) FROM numbers;") == ["50"]

        def values(name: str) -> list[Any]:
            return [event.values[0] for event in of(recorder.events, session.pid, name)]

        assert values("query__start") == session.sent
        assert values("query__done") == [statement for statement in session.sent if statement != failing]
        started, committed, aborted = (values(f"transaction__{what}") for what in ("start", "commit", "abort"))
        assert len(aborted) == 2
        assert len(started) == len(set(started)) == 51 + 2 + 2
        # by the server's own numbers
        assert committed == [number for number in started if number not in aborted]
        kinds = [event.probe.name for event in of(recorder.events, session.pid, "query__start", "query__done")]
        assert kinds[:4] == ["query__start", "query__done"] * 2


def test_semaphores_of_backends_forked_before_and_after(daemon: Daemon, cluster: Cluster) -> None:
    with Client(daemon.target) as client:
        listing = client.list_probes(["postgresql:*"], pids=[cluster.pid])
    armed = armed_semaphores(listing)
    assert armed.total() == sum(len(probe.sites) for probe in listing)
    with ExitStack() as stack:
        before = stack.enter_context(Session(cluster))
        assert semaphores(before.pid, listing) == Counter()
        with Recorder(daemon.target, "postgresql:*"):
            assert semaphores(cluster.pid, listing) == armed
            assert semaphores(before.pid, listing) == armed
            during = stack.enter_context(Session(cluster))
            assert semaphores(during.pid, listing) == armed
        after = stack.enter_context(Session(cluster))
        for pid in (cluster.pid, before.pid, during.pid, after.pid):
            assert semaphores(pid, listing) == Counter()


def test_all_sites_arm_with_every_argument(daemon: Daemon, cluster: Cluster) -> None:
    with Client(daemon.target) as client:
        listing = client.list_probes(["postgresql:*"], pids=[cluster.pid], details=True)
    assert listing.problems == ()
    sites = [(probe.name, site) for probe in listing for site in probe.sites]
    assert len(sites) == notes_in(cluster.path)
    assert not [each for _, site in sites for each in site.arguments if isinstance(each.operand, Unavailable)]
    with Session(cluster) as session:
        with Recorder(daemon.target, "postgresql:*", kernel_buffer_kib=16384) as recorder:
            armed = [(status.name, status.offset) for status in recorder.armed()]
            assert armed == [(status.name, status.offset) for status in recorder.statuses]
            assert Counter(armed) == Counter((name, site.offset) for name, site in sites)
            session.do(
                "CREATE TABLE things AS SELECT generate_series(1, 1000) AS n;", "CHECKPOINT;", "DROP TABLE things;"
            )
        buffers = int(session.do("SELECT setting FROM pg_settings WHERE name = 'shared_buffers';")[0])
    assert len({event.probe.name for event in recorder.events}) > 30
    assert not [event for event in recorder.events if event.unavailable]
    (start,) = (event for event in recorder.events if event.probe.name == "buffer__sync__start")
    (done,) = (event for event in recorder.events if event.probe.name == "buffer__sync__done")
    written = sum(event.probe.name == "buffer__sync__written" for event in recorder.events)
    assert written > 0
    assert start.values == (buffers, written)
    # Debian's PostgreSQL 15 has -4@NBuffers(%rip) here
    assert done.values == (buffers, written, written)
    account = recorder.finish()
    assert (account.fired, account.lost) == (account.delivered, 0)
