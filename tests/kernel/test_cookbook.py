"""The cookbook's program about statements: PostgreSQL, its log and its client tell each of its numbers, too."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.examples import in_documents
from tests.kernel.test_postgresql import Cluster, Session, contend, running_cluster
from tests.support import Daemon, armed_semaphores, require, semaphores, stapsdt_command, wait_for

# the program is about all PostgreSQLs of the host
pytestmark = [pytest.mark.kernel, pytest.mark.alone]

_PROBES = ["postgresql:query__start", "postgresql:query__done", "postgresql:lock__wait__*"]
_KEY_BYTES = 24
_TRANSACTIONS, _WAITS, _WAIT_SECONDS = 200, 4, 0.4
"""The waits last so long that no statement of pgbench is slower."""
_RELATION, _ACCESS_EXCLUSIVE = 0, 8


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(
        "shared_preload_libraries=pg_stat_statements",
        "log_min_duration_statement=0",
        "log_lock_waits=on",
        "deadlock_timeout=10ms",
        "log_line_prefix=%p ",
    ) as running:
        require((running.programs / "pgbench").exists(), "pgbench")
        yield running


def key_of(statement: str) -> str:
    """Return the program's key, without the semicolon that pg_stat_statements leaves out."""
    return statement[:_KEY_BYTES].rstrip("; ")


def executed(session: Session) -> dict[str, tuple[int, float]]:
    """Return how often statements ran and, in microseconds, how long their execution took, by key."""
    found: dict[str, tuple[int, float]] = {}
    for row in session.do(
        "SELECT calls, total_exec_time * 1000, replace(query, E'\\n', ' ') FROM pg_stat_statements "
        "WHERE query NOT LIKE '%pg_stat%';"
    ):
        calls, microseconds, query = row.split("|", 2)
        count, total = found.get(key_of(query), (0, 0.0))
        found[key_of(query)] = count + int(calls), total + float(microseconds)
    return found


def waited_for(report: str) -> dict[str, float]:
    """Return how long pgbench waited for each of its statements on the average, in microseconds, by key."""
    rows = re.findall(r"^ +([\d.]+) +\d+ +([A-Z].*;)$", report, re.MULTILINE)
    return {key_of(statement): float(milliseconds) * 1000 for milliseconds, statement in rows}


def test_program_tells_what_postgresql_tells(daemon: Daemon, cluster: Cluster, tmp_path: Path) -> None:
    """The probes fire around what the server times, and within what its client times; all three clocks are one."""
    (source,) = (each.source for each in in_documents("d") if each.file_name == "statements.d")
    script = tmp_path / "statements.d"
    script.write_text(source)
    pgbench = [str(cluster.programs / "pgbench"), "-h", str(cluster.folder), "-U", "postgres", "postgres"]
    subprocess.run([*pgbench, "-i", "-q"], check=True, capture_output=True)
    with Session(cluster) as asking, Session(cluster) as holder, Session(cluster) as waiter:
        asking.do("CREATE EXTENSION pg_stat_statements;", "CREATE TABLE wanted (number int);")
        wanted = int(asking.do("SELECT 'wanted'::regclass::oid;")[0])
        with Client(daemon.target) as client:
            listing = client.list_probes(_PROBES, pids=[cluster.pid])
        asking.do("SELECT pg_stat_statements_reset();")
        command = [*stapsdt_command(daemon.target, "d"), "-s", str(script)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracing:
            wait_for(lambda: semaphores(cluster.pid, listing) == armed_semaphores(listing), "the probes to be armed")
            load = [*pgbench, "-r", "-c", "3", "-t", str(_TRANSACTIONS)]
            report = subprocess.run(load, check=True, capture_output=True, text=True).stdout
            for _ in range(_WAITS):
                contend(holder, waiter, "wanted", _WAIT_SECONDS)
            tracing.send_signal(signal.SIGINT)
            output, errors = tracing.communicate(timeout=60)
        assert (tracing.returncode, errors) == (0, "")
        _, _, log = (cluster.folder / "log").read_text().rpartition("pg_stat_statements_reset();\n")
        server = executed(asking)

    # how often: what the server logs, and what it has counted, where its normalized text begins like the statement
    rows = re.findall(r"^(.*\S) +(\d+) times +(\d+) us$", output, re.MULTILINE)
    told = {key_of(key): (int(count), int(total)) for key, count, total in rows}
    logged = re.findall(r"^(\d+) LOG:  duration: ([\d.]+) ms  statement: (.*)$", log, re.MULTILINE)
    assert {key: count for key, (count, _) in told.items()} == Counter(key_of(text) for *_, text in logged)
    counted = {key: count for key, (count, _) in server.items() if "$" not in key}
    assert counted == {key: count for key, (count, _) in told.items() if "pg_sleep" not in key}
    # how long: at least as long as the execution took, at most as long as the client waited, both rounded
    client_waited = waited_for(report)
    assert len(client_waited) == 7
    for key, (count, total) in told.items():
        assert "pg_sleep" in key or total + 1 >= server[key][1], key
        assert key not in client_waited or total <= count * (client_waited[key] + 0.5), key
    # the slowest was one that waited; the log rounds, and has no time for writing itself
    slowest = re.search(r"^slowest: (\d+) us in process (\d+): (.*)$", output, re.MULTILINE)
    assert slowest
    milliseconds = max(float(duration) for pid, duration, _ in logged if int(pid) == waiter.pid)
    assert (int(slowest[2]), slowest[3]) == (waiter.pid, "LOCK TABLE wanted;")
    assert int(slowest[1]) == pytest.approx(milliseconds * 1000, rel=0.02)
    # locks: those that were provoked, and the time that the server logs of them
    ours = re.escape(f"type {_RELATION}, object {wanted}, mode {_ACCESS_EXCLUSIVE}")
    lock = re.search(rf"^{ours}: (\d+) waits, (\d+) us$", output, re.MULTILINE)
    assert lock, output
    waits = re.findall(rf"acquired AccessExclusiveLock on relation {wanted} of database \d+ after ([\d.]+) ms", log)
    assert int(lock[1]) == len(waits) == _WAITS
    assert int(lock[2]) == pytest.approx(sum(map(float, waits)) * 1000, rel=0.02)
