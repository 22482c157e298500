"""The cookbook's program for PostgreSQL, under pgbench, beside what PostgreSQL says of itself."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.examples import Example, in_documents
from tests.kernel.test_postgresql import Cluster, Session, running_cluster
from tests.support import Daemon, stapsdt_command, wait_for

# the program is for every PostgreSQL of this host
pytestmark = [pytest.mark.kernel, pytest.mark.alone]

(PROGRAM,) = (each for each in in_documents("d") if each.file_name == "statements.d")
(EXECUTED,) = (each for each in in_documents("d") if each.file_name == "executed.d")
SCRIPT = """\
UPDATE pgbench_tellers SET tbalance = tbalance + 1;
SELECT sum(abalance) FROM pgbench_accounts;
SELECT pg_sleep(0.001);
"""
CLIENTS, TRANSACTIONS = 4, 25
LINE_MICROSECONDS = 300
"""For a line of the log, which the server writes between its clock and the probe."""
LOGGED = ("log_min_duration_statement=0", "log_lock_waits=on", "deadlock_timeout=1ms", "log_line_prefix=%p ")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(*LOGGED) as running:
        yield running


class Tracing:
    """The program, while it runs. output: what it printed, once it is over."""

    output = ""


@contextmanager
def traced(daemon: Daemon, folder: Path, program: Example = PROGRAM) -> Iterator[Tracing]:
    path = folder / program.file_name
    path.write_text(program.source)
    tracing = Tracing()
    command = stapsdt_command(daemon.target, "d", "-q", "-s", str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Client(daemon.target) as client:
        wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the program to run")
        yield tracing
        process.send_signal(signal.SIGINT)
        tracing.output, _ = process.communicate(timeout=60)
    assert process.returncode == 0


def pgbench(cluster: Cluster, *arguments: str | Path) -> None:
    command = [cluster.programs / "pgbench", "-h", cluster.folder, "-U", "postgres", *arguments, "postgres"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def logged_statements(log: str) -> dict[str, list[tuple[float, int]]]:
    """By text: microseconds and process of each."""
    found: dict[str, list[tuple[float, int]]] = {}
    for pid, milliseconds, text in re.findall(
        r"^(\d+) LOG:  duration: ([\d.]+) ms  statement: (.*)$", log, re.MULTILINE
    ):
        found.setdefault(text, []).append((float(milliseconds) * 1e3, int(pid)))
    return found


def logged_waits(log: str) -> dict[int, list[float]]:
    """Microseconds by relation."""
    found: dict[int, list[float]] = {}
    pattern = r"acquired \w+ on relation (\d+) of database \d+ after ([\d.]+) ms"
    for relation, milliseconds in re.findall(pattern, log):
        found.setdefault(int(relation), []).append(float(milliseconds) * 1e3)
    return found


def test_postgresql_says_the_same_of_its_statements(daemon: Daemon, cluster: Cluster, tmp_path: Path) -> None:
    pgbench(cluster, "-i", "-q")
    script = tmp_path / "script.sql"
    script.write_text(SCRIPT)
    before = len((cluster.folder / "log").read_text())
    with Session(cluster) as slow:
        with traced(daemon, tmp_path) as tracing:
            pgbench(cluster, "-n", "-c", str(CLIENTS), "-t", str(TRANSACTIONS), "-f", script)
            slow.do("SELECT pg_sleep(0.7);")
        # the log has what a process wrote when it is over
        logged = logged_statements((cluster.folder / "log").read_text()[before:])
        calls = re.findall(r"^ *(\d+) calls of +(\d+) us: (.*)$", tracing.output, re.MULTILINE)
        ours = {text: (int(count), int(mean)) for count, mean, text in calls}
        for text in SCRIPT.splitlines():
            count, mean = ours[text]
            assert count == len(logged[text]) == CLIENTS * TRANSACTIONS
            # the server stops its clock, writes the line, and fires the probe
            theirs = sum(duration for duration, _ in logged[text]) / count
            assert 0.98 * theirs - 1 <= mean <= 1.02 * theirs + LINE_MICROSECONDS
        found = re.search(r"^slowest: (\d+) us in process (\d+): (.*)$", tracing.output, re.MULTILINE)
        assert found
        assert (int(found[2]), found[3]) == (slow.pid, "SELECT pg_sleep(0.7);")
        ((longest, pid),) = logged["SELECT pg_sleep(0.7);"]
        assert pid == slow.pid
        assert int(found[1]) == pytest.approx(longest, rel=0.02)


@pytest.mark.parametrize("protocol", ["simple", "extended", "prepared"])
def test_what_is_executed_is_counted_whatever_the_protocol(
    daemon: Daemon, cluster: Cluster, tmp_path: Path, protocol: str
) -> None:
    pgbench(cluster, "-i", "-q")
    script = tmp_path / "script.sql"
    script.write_text(SCRIPT)
    with traced(daemon, tmp_path, EXECUTED) as tracing:
        many = ("-c", str(CLIENTS), "-t", str(TRANSACTIONS))
        pgbench(cluster, "-n", "-M", protocol, *many, "-f", script)
    calls = re.findall(r"^ *(\d+) calls of +(\d+) us: (.*?);?$", tracing.output, re.MULTILINE)
    ours = {text: (int(count), int(mean)) for count, mean, text in calls}
    for text in SCRIPT.splitlines():
        assert ours[text.removesuffix(";")][0] == CLIENTS * TRANSACTIONS
    assert 1000 <= ours["SELECT pg_sleep(0.001)"][1] < 50_000


@pytest.mark.parametrize("engine", ["bpf"])
def test_statements_that_fail_do_not_lengthen_others(daemon: Daemon, cluster: Cluster) -> None:
    wanted = ["latency", "postgresql:query__start", "--by", "query", "--pid", str(cluster.pid), "--follow", "--json"]
    with Session(cluster) as session:
        command = stapsdt_command(daemon.target, *wanted)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            with Client(daemon.target) as client:
                wait_for(lambda: any(each.streaming for each in client.subscriptions()), "it to run")
            for _ in range(3):
                session.do("SELECT 1 / (length(pg_sleep(0.5)::text));", "SELECT 7;")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    rows = {row["key"][0]: row for row in map(json.loads, out.splitlines()) if "count" in row}
    assert rows["SELECT 7;"]["count"] == 3, (out, err)
    assert rows["SELECT 7;"]["max"] < 400e6
    assert json.loads(err.splitlines()[-1])["spans"] | {"died": 0} == {
        "starts": 6, "paired": 3, "nested": 3, "died": 0, "timed_out": 0, "table_full": 0, "open": 0, "unmatched": 0
    }  # fmt: skip


def test_postgresql_says_the_same_of_its_locks(daemon: Daemon, cluster: Cluster, tmp_path: Path) -> None:
    with Session(cluster) as holder, Session(cluster) as waiter, Session(cluster) as third:
        third.do("CREATE TABLE stock (count int);", "CREATE TABLE orders (number int);")
        with traced(daemon, tmp_path) as tracing:
            for number in range(6):
                table = ("stock", "orders", "stock")[number % 3]
                holder.do("BEGIN;", f"LOCK TABLE {table};")
                waiter.begin(f"SELECT count(*) FROM {table};")
                waiting = f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {waiter.pid};"
                wait_for(lambda: third.do(waiting) == ["Lock"], "the other to wait")  # noqa: B023
                holder.do("SELECT pg_sleep(0.02);", "COMMIT;")
                waiter.finish()
        relations = {table: int(third.do(f"SELECT '{table}'::regclass::oid;")[0]) for table in ("stock", "orders")}
    waits = re.findall(r"^ *(\d+) waits of +(\d+) us: lock type 0, relation (\d+)$", tracing.output, re.MULTILINE)
    ours = {int(relation): (int(count), int(mean)) for count, mean, relation in waits}
    logged = logged_waits((cluster.folder / "log").read_text())
    assert {relation: count for relation, (count, _) in ours.items()} == {relations["stock"]: 4, relations["orders"]: 2}
    assert ours.keys() == logged.keys()
    for relation, (count, mean) in ours.items():
        assert count == len(logged[relation])
        assert mean == pytest.approx(sum(logged[relation]) / count, rel=0.02, abs=100)
