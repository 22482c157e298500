"""Commands and clients go on after the server was restarted: cleanly, and after it was killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.cli.options import KEPT_MS
from stapsdtd.client import (
    Aggregate,
    AsyncClient,
    Client,
    End,
    EventBatch,
    NotFoundError,
    Resubscribed,
    Snapshot,
)
from tests.support import TICKER, TIME_FACTOR, Daemon, Ticker, running_daemon, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel

TICK = f"{TICKER}:tick(arg0)"
BEFORE, AFTER = 100, 50
_ACCOUNTS = {"stop": BEFORE, "kill": "unknown"}


@pytest.fixture(params=["stop", "kill"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path) as daemon:
        yield daemon


def end(daemon: Daemon, way: str) -> None:
    if way == "kill":
        daemon.kill()
    else:
        assert daemon.stop() == 0


class Command:
    """A running command. out, err: the lines that it has written so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=lambda lines, pipe: lines.extend(line.rstrip("\n") for line in pipe), args=each)
            for each in ((self.out, process.stdout), (self.err, process.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, text: str) -> None:
        wait_for(lambda: any(text in line for line in self.err), f"{text!r} among {self.err}", seconds=30)

    def finish(self, signum: signal.Signals | None = signal.SIGINT) -> int:
        if signum is not None:
            self.process.send_signal(signum)
        status = self.process.wait(timeout=30 * TIME_FACTOR)
        for thread in self._threads:
            thread.join()
        return status

    @property
    def summary(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.err[-1])
        return record


@contextmanager
def running(daemon: Daemon, *arguments: str) -> Iterator[Command]:
    with subprocess.Popen(
        stapsdt_command(daemon.target, *arguments),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        command = Command(process)
        try:
            yield command
        finally:
            process.kill()
            command.finish(None)


def begun(daemon: Daemon, ticker: Ticker) -> None:
    """Wait until the only subscription is armed and read."""
    with Client(daemon.target) as client:
        wait_for(lambda: [each.streaming for each in client.subscriptions()] == [True], "the stream to begin")
    assert ticker.semaphore == 1


def restart(daemon: Daemon, way: str, command: Command, ticker: Ticker) -> None:
    end(daemon, way)
    command.wait_for("interrupted")
    daemon.restart()
    command.wait_for("subscribed")
    wait_for(lambda: ticker.semaphore == 1, "the probe to be armed again")


def test_trace(served: Daemon, ticker: Ticker, way: str) -> None:
    with running(served, "trace", TICK, "--pid", str(ticker.pid), "--json") as command:
        begun(served, ticker)
        ticker.do(f"fire {BEFORE}")
        wait_for(lambda: len(command.out) == BEFORE, "the events")
        restart(served, way, command, ticker)
        ticker.do(f"fire {AFTER}")
        wait_for(lambda: len(command.out) == BEFORE + AFTER, "the events after it")
        assert command.finish() == 0
    values = [json.loads(line)["args"][0] for line in command.out]
    assert values == [*range(BEFORE), *range(AFTER)]
    summary = command.summary
    assert (summary["delivered"], summary["lost"], summary["sites"]) == (BEFORE + AFTER, 0, 1)
    assert summary.get("account", "known") == ("unknown" if way == "kill" else "known")
    (told,) = summary["restarts"]
    assert told["ended_ns"] < told["subscribed_ns"]
    assert (told["account"] if way == "kill" else told["account"]["delivered"]) == _ACCOUNTS[way]


def test_one_line_tells_of_it(served: Daemon, ticker: Ticker, way: str) -> None:
    with running(served, "trace", TICK, "--pid", str(ticker.pid)) as command:
        begun(served, ticker)
        restart(served, way, command, ticker)
        assert command.finish() == 0
    (line,) = [line for line in command.err if "subscribed again" in line]
    assert line.startswith("stapsdt: the server was " + ("killed and restarted" if way == "kill" else "restarted"))
    assert "hits in between are not counted" in line
    known = "the 1 restart of the server took " in command.err[-1]
    assert known if way == "stop" else "the server gave no account until a restart" in command.err[-1]


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["count", TICKER + ":tick", "--by", "arg2:str"], {"key": ["tick"], "count": 6}),
        (
            ["stats", TICKER + ":tick", "arg0"],
            {"key": [], "count": 6, "avg": 2 / 3, "min": 0, "max": 2, "sum": 4},
        ),
        (
            ["hist", TICKER + ":tick", "arg0"],
            {"key": [], "count": 6, "max": 2, "buckets": [[0, 0, 3], [1, 1, 2], [2, 2, 1]]},
        ),
    ],
)
def test_aggregations_go_on(served: Daemon, ticker: Ticker, way: str, arguments: Sequence[str], row: object) -> None:
    """Fire 3, which is 0, 1, 2; then fire 1 and fire 2."""
    with running(served, *arguments, "--json", "--pid", str(ticker.pid)) as command:
        begun(served, ticker)
        ticker.do("fire 3")
        if way == "kill":
            wait_for_snapshot()
        restart(served, way, command, ticker)
        ticker.do("fire 1")
        ticker.do("fire 2")
        assert command.finish() == 0
    assert list(map(json.loads, command.out)) == [row]
    summary = command.summary
    assert (summary["aggregated"], summary["lost"], summary["sites"]) == (6, 0, 1)
    assert summary.get("account", "known") == ("unknown" if way == "kill" else "known")


def wait_for_snapshot() -> None:
    """Until one that a command keeps for the case that the server is killed has the hits so far."""
    time.sleep(1.2 * KEPT_MS / 1000 * TIME_FACTOR)


def test_latencies_go_on(served: Daemon, ticker: Ticker) -> None:
    with running(served, "latency", TICKER + ":tick", TICKER + ":text", "--json", "--pid", str(ticker.pid)) as command:
        begun(served, ticker)
        for _ in range(3):
            ticker.do("fire 1")
            ticker.do("text some")
        restart(served, "stop", command, ticker)
        for _ in range(2):
            ticker.do("fire 1")
            ticker.do("text some")
        assert command.finish() == 0
    (row,) = map(json.loads, command.out)
    assert row["count"] == 5
    assert sum(bucket[2] for bucket in row["buckets"]) == 5
    assert command.summary["spans"]["paired"] == 5


def test_top_goes_on(served: Daemon, ticker: Ticker, way: str) -> None:
    with running(served, "top", TICKER + ":tick", "--json", "--interval", "0.2", "--pid", str(ticker.pid)) as command:
        begun(served, ticker)
        ticker.do("fire 3")
        wait_for(lambda: command.out and json.loads(command.out[-1])["total"] == 3, "an interval")
        restart(served, way, command, ticker)
        ticker.do("fire 4")
        wait_for(lambda: json.loads(command.out[-1])["total"] == 7, "an interval after it")
        assert command.finish() == 0
    assert command.summary["delivered"] == 7


@pytest.mark.parametrize("adds_up", ["the server", "the program"])
def test_a_d_program_goes_on(served: Daemon, ticker: Ticker, adds_up: str) -> None:
    program = f"""
        BEGIN {{ printf("begins\\n"); }}
        {TICKER}{ticker.pid}:::tick {{ @[copyinstr(arg2)] = sum(arg0); {"" if adds_up == "the server" else "n++;"} }}
        END {{ printf("ends {"" if adds_up == "the server" else "%d"}\\n"{"" if adds_up == "the server" else ", n"}); }}
    """
    with running(served, "d", "-q", "-n", program) as command:
        begun(served, ticker)
        ticker.do("fire 4")
        restart(served, "stop", command, ticker)
        ticker.do("fire 3")
        assert command.finish() == 0
    lines = [line.split() for line in command.out if line]
    assert lines == [["begins"], ["ends", *([] if adds_up == "the server" else ["7"])], ["tick", "9"]]


def test_the_same_command_is_followed(
    served: Daemon, ticker_program: Path, ticker: Ticker, way: str, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    with running(served, "trace", TICK, "--json", "-o", str(events), "--", str(ticker_program)) as command:
        wait_for(lambda: "ready" in command.out, "the command to run")
        assert command.process.stdin is not None
        command.process.stdin.write("fire 2\n")
        wait_for(lambda: len(command.out) == 2, "the command to fire")
        wait_for(lambda: events.read_text().count("\n") == 2, "its events")
        restart(served, way, command, ticker)
        ticker.do("fire 5")
        command.process.stdin.write("fire 3\nquit\n")
        status = command.finish(None)
    assert status == 0
    pids = {json.loads(line)["pid"] for line in events.read_text().splitlines()}
    assert len(pids) == 1
    assert ticker.pid not in pids
    assert events.read_text().count("\n") == 5


def test_without_retry_it_ends(served: Daemon, ticker: Ticker, way: str) -> None:
    with running(served, "trace", TICK, "--no-retry", "--pid", str(ticker.pid)) as command:
        begun(served, ticker)
        end(served, way)
        served.restart()
        assert command.finish(None) == 1
    assert not [line for line in command.err if "subscribed again" in line]
    wanted = "the server stopped" if way == "stop" else "the server forgot the subscription"
    assert [line for line in command.err if wanted in line]


@pytest.mark.parametrize("how", ["interrupted", "its time is up"])
def test_a_command_that_waits_for_the_server_can_be_ended(served: Daemon, ticker: Ticker, way: str, how: str) -> None:
    limit = [] if how == "interrupted" else ["--duration", "3"]
    with running(served, "trace", TICK, "--json", *limit, "--pid", str(ticker.pid)) as command:
        begun(served, ticker)
        ticker.do("fire 3")
        wait_for(lambda: len(command.out) == 3, "the events")
        end(served, way)
        command.wait_for("interrupted")
        assert command.finish(None if limit else signal.SIGINT) == 1
    summary = command.summary
    assert summary["delivered"] == 3
    assert summary.get("account", "known") == ("unknown" if way == "kill" else "known")
    served.restart()


def test_a_watch_goes_on(served: Daemon, ticker_program: Path, way: str) -> None:
    with Ticker(ticker_program) as first, running(served, "watch", TICKER + ":tick", "--json") as command:

        def shown() -> list[tuple[str, list[int]]]:
            records = map(json.loads, command.out)
            return [(record["change"], record["pids"]) for record in records]

        wait_for(lambda: shown() == [("added", [first.pid])], "the first one")
        end(served, way)
        command.wait_for("interrupted")
        first.kill()
        with Ticker(ticker_program) as second:
            served.restart()
            wait_for(lambda: shown()[1:] == [("removed", [first.pid]), ("added", [second.pid])], "what changed")
            command.finish()
    assert "watching_again_after_seconds" in command.err[-1]


def restarted(daemon: Daemon, way: str, ticker: Ticker) -> None:
    end(daemon, way)
    daemon.restart()
    wait_for(lambda: ticker.semaphore == 1, "the probe to be armed again")
    ticker.do(f"fire {AFTER}")


def check(seen: Sequence[object], restarts: Sequence[Resubscribed], way: str) -> None:
    assert seen == [*range(BEFORE), *range(AFTER)]
    (told,) = restarts
    assert (told.account is None) == (way == "kill")
    assert told.account is None or (told.account.delivered, told.account.lost) == (BEFORE, 0)
    assert 0 < told.seconds < 60


def test_the_blocking_client(served: Daemon, ticker: Ticker, way: str) -> None:
    seen: list[object] = []
    with Client(served.target) as client, client.subscribe(TICK) as subscription, ExitStack() as stack:
        ticker.do(f"fire {BEFORE}")
        for message in subscription.messages(resubscribe=True):
            match message:
                case EventBatch(events=events):
                    seen += [event.values[0] for event in events]
                    if len(seen) == BEFORE:
                        restarting = threading.Thread(target=restarted, args=[served, way, ticker])
                        restarting.start()
                        stack.callback(restarting.join)
                    if len(seen) == BEFORE + AFTER:
                        subscription.unsubscribe()
                case End():
                    break
                case _:
                    pass
        check(seen, subscription.restarts, way)
        assert (subscription.total is None) == (way == "kill")
        assert subscription.total is None or subscription.total.delivered == BEFORE + AFTER
        assert subscription.sites_armed == 1


def test_the_asyncio_client(served: Daemon, ticker: Ticker, way: str) -> None:
    async def read() -> None:
        seen: list[object] = []
        restarting: asyncio.Future[None] | None = None
        async with AsyncClient(served.target) as client, client.subscribe(TICK) as subscription:
            ticker.do(f"fire {BEFORE}")
            async for event in subscription.events(resubscribe=True, idle_seconds=30):
                seen.append(event.values[0])
                if len(seen) == BEFORE:
                    restarting = asyncio.ensure_future(asyncio.to_thread(restarted, served, way, ticker))
                if len(seen) == BEFORE + AFTER:
                    break
            assert restarting is not None
            await restarting
            check(seen, subscription.restarts, way)
            ids = {site.site_id for site in subscription.armed_so_far}
            assert len(ids) == 2

    asyncio.run(read())


def test_an_idle_stream_does_not_wait_for_a_server_that_stays_away(served: Daemon, ticker: Ticker) -> None:
    begun_at = time.monotonic()
    with Client(served.target) as client, client.subscribe(TICK) as subscription:
        subscription.open_stream()
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        ticker.do("fire 2")
        stopping = threading.Timer(1, end, (served, "stop"))
        stopping.start()
        assert [each.seq for each in subscription.events(resubscribe=True, idle_seconds=5)] == [1, 2]
        stopping.join()
        assert not subscription.restarts
    assert time.monotonic() - begun_at < 40 * TIME_FACTOR


def test_columns_have_sites_of_their_own(served: Daemon, ticker: Ticker) -> None:
    with Client(served.target) as client, client.subscribe(TICK) as subscription:
        ticker.do("fire 2")
        batches = subscription.columns(resubscribe=True)
        first = next(batches)
        restarting = threading.Thread(target=restarted, args=[served, "stop", ticker])
        restarting.start()
        second = next(batches)
        restarting.join()
        assert set(first.site_id.tolist()).isdisjoint(second.site_id.tolist())
        assert second.sites[int(second.site_id[0])].probe.name == "tick"


def test_without_asking_the_client_does_not_go_on(served: Daemon, ticker: Ticker) -> None:
    with Client(served.target) as client, client.subscribe(TICK) as subscription:
        ticker.do("fire 2")
        served.kill()
        served.restart()
        with pytest.raises(NotFoundError):
            list(subscription.events())


def test_snapshots_of_intervals_go_on(served: Daemon, ticker: Ticker, way: str) -> None:
    with (
        Client(served.target) as client,
        client.aggregate(TICKER + ":tick", Aggregate(interval_ms=100)) as subscription,
        ExitStack() as stack,
    ):
        ticker.do("fire 3")
        snapshots: list[Snapshot] = []
        hits, restarting = 0, threading.Thread(target=restarted, args=[served, way, ticker])
        for snapshot in subscription.snapshots(resubscribe=True):
            snapshots.append(snapshot)
            hits += sum(int(row.values["count"] or 0) for row in snapshot.rows)
            if hits == 3 and restarting.ident is None:
                restarting.start()
                stack.callback(restarting.join)
            if hits == 3 + AFTER:
                break
    assert [snapshot.number for snapshot in snapshots] == list(range(1, len(snapshots) + 1))
    assert snapshots[-1].account.aggregated == 3 + AFTER
