"""Many clients at once, and clients that die, stall, flood and talk nonsense: each harms nobody but itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from stapsdtd.client import Client, ClientError, InvalidRequestError, SubscribeOptions
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import sites
from tests.support import (
    TARGETS,
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    descriptors,
    resident_kib,
    running_daemon,
    semaphores,
    wait_for,
)

pytestmark = pytest.mark.kernel

_NOBODY = 65534
_LEASE_SECONDS = 5
_LONG_LEASE_SECONDS = 60

_Wish = dict[str, Any]
_Result = dict[str, int]


class Clients:
    """Processes of tests/targets/clients.py, with their subscriptions armed."""

    def __init__(self, target: str, clients: list[list[_Wish]]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, TARGETS / "clients.py", target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say(json.dumps(clients))
        self.pids: list[int] = json.loads(self._hear())

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def finish(self) -> dict[int, list[_Result]]:
        """What each client that lives saw."""
        self._say("")
        assert self._process.stdout is not None
        found = [json.loads(line) for line in self._process.stdout]
        return {each["pid"]: each["results"] for each in found}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def selector(program: Path, name: str) -> str:
    return f"{TICKER}:{program}::{name}"


def wish(program: Path, name: str, where: str = "", lease_seconds: int = _LONG_LEASE_SECONDS) -> _Wish:
    """One that fits 200 times into what a server allows all clients together."""
    return {
        "selectors": selector(program, name),
        "where": where,
        "lease_seconds": lease_seconds,
        "queue_bytes": 1 << 20,
        "kernel_buffer_kib": 1024,
    }


def wait_for_streams(client: Client, count: int) -> None:
    """So many subscriptions, and each of them with a stream: until then their leases run."""
    wait_for(lambda: [each.streaming for each in client.subscriptions()] == [True] * count, f"{count} streams")


@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_200_subscriptions_of_50_clients_share_what_one_has_armed(
    own_daemon: Daemon, ticker: Ticker, ticker_program: Path, tracefs: Tracefs
) -> None:
    fired = 1000
    wheres = ["", "arg0 & 1", "arg0 < 10", "arg0 == 7 || arg0 == 8"]
    wanted = [range(fired), range(1, fired, 2), range(10), (7, 8)]
    names = ["tick(arg0)", "t*(arg0)", "*(arg0)", "ti?k(arg0, arg1)"]
    clients = [
        [wish(ticker_program, names[(number + place) % 4], wheres[place]) for place in range(4)] for number in range(50)
    ]
    with Recorder(own_daemon.target, selector(ticker_program, "*(arg0)")) as recorder:
        alone = sites(tracefs, own_daemon.pid)
        assert len(alone) == len(recorder.sites) == 3
        with Clients(own_daemon.target, clients) as many, Client(own_daemon.target) as client:
            wait_for_streams(client, 201)
            assert sites(tracefs, own_daemon.pid) == alone
            assert ticker.do(f"fire {fired}") == 1
            results = many.finish()
        assert sites(tracefs, own_daemon.pid) == alone
    assert len(results) == 50
    for seen in results.values():
        for numbers, result in zip(wanted, seen, strict=True):
            assert result == {
                "events": len(numbers),
                "total": sum(numbers),
                "fired": fired,
                "delivered": len(numbers),
                "filtered": fired - len(numbers),
                "lost": 0,
            }
    assert [value for (value,) in recorder.values()] == list(range(fired))
    assert sites(tracefs, own_daemon.pid) == []
    assert ticker.semaphore == 0


def test_client_that_is_killed_frees_what_only_it_used_within_its_lease(
    daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    dying = [wish(ticker_program, name, lease_seconds=_LEASE_SECONDS) for name in ("tick(arg0)", "text(arg1)")]
    with Client(daemon.target) as client, ExitStack() as stack:
        probes = {probe.name: probe for probe in client.list_probes(selector(ticker_program, "*"))}

        def armed() -> list[bool]:
            """By their semaphores: the probe of all clients, and that of the dying."""
            return [any(semaphores(ticker.pid, [probes[name]]).values()) for name in ("tick", "text")]

        killed = stack.enter_context(Clients(daemon.target, [dying] * 3))
        others = stack.enter_context(Clients(daemon.target, [[wish(ticker_program, "tick(arg0)")]] * 2))
        wait_for_streams(client, 3 * 2 + 2)
        ticker.do("fire 10")
        assert armed() == [True, True]
        begin = time.monotonic()
        for pid in killed.pids:
            os.kill(pid, signal.SIGKILL)
        ticker.do("fire 10")
        wait_for(lambda: len(client.subscriptions()) == 2, "the leases to run out")
        assert time.monotonic() - begin > _LEASE_SECONDS * 0.9
        wait_for(lambda: armed() == [True, False], "what only the dead used to be disarmed")
        ticker.do("fire 10")
        for (result,) in others.finish().values():
            assert result["events"] == result["fired"] == 30
            assert result["total"] == 3 * sum(range(10))
        assert armed() == [False, False]


def test_client_that_is_stopped_loses_its_own_events_only(daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """It keeps its connection and its subscriptions, and says what it lost when it goes on."""
    fired = 200_000
    with (
        Clients(
            daemon.target, [[wish(ticker_program, "tick(arg0)")] * 2, [wish(ticker_program, "tick(arg0)")]]
        ) as many,
        Recorder(daemon.target, selector(ticker_program, "tick(arg0)"), kernel_buffer_kib=16384) as recorder,
        Client(daemon.target) as client,
    ):
        wait_for_streams(client, 4)
        os.kill(many.pids[0], signal.SIGSTOP)
        ticker.do(f"fire {fired}")
        wait_for(lambda: len(recorder.events) == fired, "all events of one who reads them")
        os.kill(many.pids[0], signal.SIGCONT)
        results = many.finish()
    assert [value for (value,) in recorder.values()] == list(range(fired))
    stopped = results[many.pids[0]]
    assert len(stopped) == 2
    for result in stopped:
        assert result["events"] == result["delivered"] < fired == result["fired"]
        assert result["lost"] == fired - result["delivered"]


@pytest.mark.alone
@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_strange_and_half_open_connections_are_nobodys_business(
    own_daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    greetings = [
        b"",
        b"PRI",
        preface,
        preface + bytes(9),
        # a frame of headers that says it is 16 MiB long, of which nothing comes
        preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01",
        # pings that nobody reads the answers of
        preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + (b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)) * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(100_000),
    ]
    before = descriptors(own_daemon.pid)
    with Recorder(own_daemon.target, selector(ticker_program, "tick(arg0)"), kernel_buffer_kib=16384) as recorder:
        with ExitStack() as stack:
            for number in range(200):
                strange = stack.enter_context(socket.socket(socket.AF_UNIX))
                strange.connect(own_daemon.target.removeprefix("unix:"))
                # never waits: what the daemon does not take is not sent
                strange.setblocking(False)
                with suppress(OSError):
                    strange.send(greetings[number % len(greetings)])
                if number % 3 == 0:
                    with suppress(OSError):
                        strange.shutdown(socket.SHUT_WR)
            ticker.do("fire 100000")
        ticker.do("fire 100000")
    assert [value for (value,) in recorder.values()] == list(range(100_000)) * 2
    wait_for(lambda: descriptors(own_daemon.pid) <= before + 1, "the connections to be closed")


@pytest.mark.alone
@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_huge_requests_are_refused_in_one_line_and_cost_nothing(
    own_daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    with Client(own_daemon.target) as client:

        def ask() -> None:
            with pytest.raises(ClientError, match="message"):
                client.subscribe("x" * (32 << 20))
            for selectors, where in ((["*:*"] * 50_000, ""), ("*" * 250_000, ""), ("*:*", "(" * 250_000)):
                with pytest.raises(InvalidRequestError) as refusal:
                    client.subscribe(selectors, SubscribeOptions(where=where))
                assert len(str(refusal.value)) < 500

        # until then the allocators of C and Python take more for each of their threads
        for _ in range(20):
            ask()
        before = resident_kib(own_daemon.pid)
        for _ in range(20):
            ask()
        # what was asked meanwhile is 15 MiB, beside what is refused before it is read
        assert resident_kib(own_daemon.pid) - before < 16 * 1024
    with Recorder(own_daemon.target, selector(ticker_program, "tick(arg0)")) as recorder:
        ticker.do("fire 3")
    assert recorder.values() == [(0,), (1,), (2,)]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users reach, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="stapsdtd-clients-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def rude(daemon: Daemon, wanted: str, kind: str, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*prefix, sys.executable, TARGETS / "rude_client.py", daemon.target, wanted, kind],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("engine", "role"), [("bpf", "operator"), ("bpf", "user"), ("ftrace", "user")])
def test_flood_of_subscribe_does_not_keep_another_from_its_events(
    engine: str, open_folder: Path, ticker_program: Path, tracefs: Tracefs, role: str
) -> None:
    """A user's is bound by its quotas. An operator's is not, and finds the server's limit; it frees what it took."""
    program = Path(str(open_folder / "ticker"))
    program.write_bytes(ticker_program.read_bytes())
    program.chmod(0o755)
    as_role = ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups") if role == "user" else ()
    fired = 200_000 if engine == "bpf" else 50_000
    with (
        running_daemon(open_folder, "--engine", engine) as daemon,
        Ticker(*as_role, program) as ticker,
        Recorder(daemon.target, selector(program, "tick(arg0)"), kernel_buffer_kib=16384) as recorder,
        Client(daemon.target) as client,
    ):
        alone = len(sites(tracefs, daemon.pid))
        with rude(daemon, selector(program, "t*(arg0)"), "subscribe", *as_role):
            ticker.do(f"fire {fired}")
            if role == "user":
                assert len(client.subscriptions()) <= 1 + 16
                with Recorder(daemon.target, selector(program, "tick(arg0)")) as another:
                    ticker.do("fire 5")
                assert len(another.events) == 5
        wait_for(lambda: len(client.subscriptions()) == 1, "the leases to run out", seconds=60)
        wait_for(lambda: len(sites(tracefs, daemon.pid)) == alone, "what the flood used to be disarmed")
        ticker.do("fire 3")
    expected = [*range(fired), *(range(5) if role == "user" else ()), *range(3)]
    assert [value for (value,) in recorder.values()] == expected


@pytest.mark.alone
@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_client_that_never_reads_its_answers_costs_little(
    own_daemon: Daemon, ticker: Ticker, ticker_program: Path
) -> None:
    with Client(own_daemon.target) as client:
        client.list_probes(details=True)
        before = resident_kib(own_daemon.pid)
        with (
            ExitStack() as stack,
            Recorder(own_daemon.target, selector(ticker_program, "tick(arg0)"), kernel_buffer_kib=16384) as recorder,
        ):
            for _ in range(2):
                stack.enter_context(rude(own_daemon, "*", "unread"))
            ticker.do("fire 100000")
            wait_for(lambda: len(recorder.events) == 100_000, "the events")
            client.list_probes(details=True)
        assert [value for (value,) in recorder.values()] == list(range(100_000))
        assert resident_kib(own_daemon.pid) - before < 128 * 1024
