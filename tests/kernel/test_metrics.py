"""Seeing inside a real daemon: its metrics, `stapsdt top`, and health where the host no longer lets it capture."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from stapsdtd.api.server import SERVICE
from stapsdtd.client import Account, Client
from stapsdtd.kernel.host_calls import TRACEFS_WRITE
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import (
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    held_port,
    running_daemon,
    stapsdt,
    stapsdt_command,
    wait_for,
)

pytestmark = pytest.mark.kernel

_NOTHING = Account(
    fired=0, delivered=0, filtered=0, lost_kernel_buffer=0, lost_queue=0, lost_decode=0, in_flight=0, sites=0
)
Figures = dict[str, float]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def daemon(tmp_path: Path, engine: str) -> Iterator[Daemon]:
    config = tmp_path / "stapsdtd.toml"
    config.write_text(f'[metrics]\nlisten = "unix:{tmp_path}/metrics.sock"\n')
    with running_daemon(tmp_path, "--config", str(config), "--engine", engine) as started:
        yield started


def scrape(folder: Path) -> Figures:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(str(folder / "metrics.sock"))
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 ")
    return {
        sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def fates(figures: Figures) -> Account:
    """As an account of everything."""
    events, lost = "stapsdtd_events_total", "stapsdtd_events_lost_total"
    numbers = {
        "delivered": figures[f"{events}[delivered]"],
        "aggregated": figures[f"{events}[aggregated]"],
        "filtered": figures[f"{events}[filtered]"],
        "lost_kernel_buffer": figures[f"{lost}[kernel_buffer]"],
        "lost_queue": figures[f"{lost}[queue]"],
        "lost_decode": figures[f"{lost}[decode]"],
        "lost_quota": figures[f"{lost}[quota]"],
        "lost_table_full": figures[f"{lost}[table_full]"],
        "in_flight": figures["stapsdtd_events_in_flight"],
    }
    assert figures[f"{events}[unread]"] == 0
    assert figures[f"{events}[started]"] == figures[f"{events}[unmatched]"] == 0
    counts: dict[str, Any] = {name: int(number) for name, number in numbers.items()}
    return replace(_NOTHING, fired=sum(counts.values()), **counts)


def summed(*accounts: Account) -> Account:
    fields = [field for field in Account.__dataclass_fields__ if field not in {"sites", "spans"}]
    sums: dict[str, Any] = {field: sum(getattr(each, field) for each in accounts) for field in fields}
    return replace(_NOTHING, **sums)


def test_metrics_agree_exactly_with_the_accounts(daemon: Daemon, ticker: Ticker, engine: str, tmp_path: Path) -> None:
    before = scrape(tmp_path)
    assert (before["stapsdtd_attachments"], before["stapsdtd_groups"], before["stapsdtd_subscriptions"]) == (0, 0, 0)
    assert before["stapsdtd_serving"] == 1
    pids = [ticker.pid]
    first = Recorder(daemon.target, f"{TICKER}:tick(arg2:str)", pids=pids, kernel_buffer_kib=4)
    with Recorder(daemon.target, f"{TICKER}:tick()", f"{TICKER}:text()", pids=pids, where="arg0 < 100") as second:
        figures = scrape(tmp_path)
        # the ftrace engine arms for each subscription anew
        assert figures["stapsdtd_attachments"] == (2 if engine == "bpf" else 3)
        assert figures["stapsdtd_groups"] >= 1
        assert figures["stapsdtd_subscriptions"] == 2
        assert (figures["stapsdtd_connections"], figures["stapsdtd_clients"]) == (1, 1)
        assert figures["stapsdtd_arm_seconds_count"] == 2
        rings = {name for name in figures if name.startswith("stapsdtd_ring_size_bytes")}
        assert rings
        assert all(figures[name] >= 4096 for name in rings)
        ticker.do("fire 300000")
        one = first.finish()
        ticker.do("fire 1000")
    two = second.finish()
    assert (one.fired, two.fired) == (300_000, 301_000)
    assert (two.filtered > 100_000, one.in_flight, two.in_flight) == (True, 0, 0)
    figures = scrape(tmp_path)
    # nothing is told twice, or forgotten with the subscription
    assert fates(figures) == summed(one, two)
    assert figures["stapsdtd_subscriptions"] == 0
    wait_for(lambda: scrape(tmp_path)["stapsdtd_attachments"] == 0, "the sites to be disarmed")
    again = scrape(tmp_path)
    # clients have series of their own while they are connected
    for name in (name for name in figures if f"[uid {os.getuid()}]" not in name):
        if name.endswith(("_total", "_count")) or "_total[" in name or "_bucket[" in name:
            assert again[name] >= figures[name]
    assert again["stapsdtd_process_scan_seconds_count"] > 0
    assert again["stapsdtd_parse_seconds_count"] > 0
    assert again["stapsdtd_sandbox_starts_total"] == 1
    assert again["stapsdtd_processes"] > 1


def test_reading_is_charged_to_the_client_whose_events_they_are(tmp_path: Path, ticker: Ticker) -> None:
    config = tmp_path / "stapsdtd.toml"
    config.write_text(f'[metrics]\nlisten = "unix:{tmp_path}/metrics.sock"\n')
    with (
        running_daemon(tmp_path, "--engine", "bpf", "--config", str(config)) as daemon,
        Recorder(daemon.target, f"{TICKER}:tick(arg0)", pids=[ticker.pid]) as recorder,
    ):
        ticker.do("fire 1000")
        wait_for(lambda: len(recorder.events) == 1000, "the events")
        charged = {name for name, value in scrape(tmp_path).items() if name.endswith("[reading]") and value}
        assert charged == {f"stapsdtd_client_cpu_seconds_total[uid {os.getuid()}][reading]"}


def test_top_counts_what_fired(daemon: Daemon, ticker: Ticker) -> None:
    command = stapsdt_command(
        daemon.target, "top", f"{TICKER}:*", "--pid", str(ticker.pid), "--json", "--interval", "0.2"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        with Client(daemon.target) as client:
            wait_for(lambda: any(held.streaming for held in client.subscriptions()), "the stream to begin")
        # what fires last may fall out of a full buffer
        ticker.do("text hello")
        ticker.do("fire 100000")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    intervals = [json.loads(line) for line in out.splitlines()]
    summary = json.loads(err.splitlines()[-1])
    assert summary["delivered"] + summary["lost"] == 100_001
    assert summary["filtered"] == 0
    counts: dict[str, int] = {}
    for probe in itertools.chain.from_iterable(each["probes"] for each in intervals):
        counts[probe["name"]] = counts.get(probe["name"], 0) + probe["count"]
        assert probe["processes"] == 1
    assert counts == {"tick": 100_000 - summary["lost"], "text": 1}
    processes = list(itertools.chain.from_iterable(each["processes"] for each in intervals))
    assert {(each["pid"], each["comm"]) for each in processes} == {(ticker.pid, "ticker")}
    assert sum(each["count"] for each in processes) == processes[-1]["total"] == summary["delivered"]
    assert sum(intervals[-1]["lost"].values()) == summary["lost"]


class TestHealth:
    """The daemon has mounts of its own, so that nobody else's tracefs is touched."""

    @pytest.fixture
    def notifications(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(tmp_path / "notify.sock"))
            manager.settimeout(20)
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify.sock"))
            yield manager

    @pytest.fixture
    def daemon(self, tmp_path: Path, engine: str, notifications: socket.socket) -> Iterator[Daemon]:
        assert notifications.fileno() > 0
        prefix = ["unshare", "--mount", "--propagation", "private"]
        started = Daemon(tmp_path, "--engine", engine, prefix=prefix)
        try:
            yield started
            assert started.stop() == 0
            assert "Traceback" not in started.log(), started.log()
        finally:
            with suppress(ProcessLookupError):
                started.process.kill()
            started.process.wait()

    @staticmethod
    @contextmanager
    def without_tracefs(daemon: Daemon, root: str, how: str) -> Iterator[None]:
        commands = {
            "read-only": (["mount", "-o", "remount,bind,ro", root], ["mount", "-o", "remount,bind,rw", root]),
            "unmounted": (["umount", "--lazy", root], ["mount", "-t", "tracefs", "nodev", root]),
        }
        within = ["nsenter", "--mount", "--target", str(daemon.pid)]
        subprocess.run([*within, *commands[how][0]], check=True)
        try:
            yield
        finally:
            subprocess.run([*within, *commands[how][1]], check=True)

    @pytest.mark.parametrize("how", ["read-only", "unmounted"])
    def test_host_that_lets_nothing_be_armed_is_not_serving_until_it_does(
        self, daemon: Daemon, ticker: Ticker, tracefs: Tracefs, notifications: socket.socket, how: str
    ) -> None:
        with grpc.insecure_channel(daemon.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
            whole = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (next(watch).status, next(whole).status) == (SERVING, SERVING)
            with self.without_tracefs(daemon, tracefs.root, how):
                assert (next(watch).status, next(whole).status) == (NOT_SERVING, NOT_SERVING)
                path = f"{tracefs.root}/uprobe_events"
                why = str(TRACEFS_WRITE.refused(path, {"read-only": errno.EROFS, "unmounted": errno.ENOENT}[how]))
                assert daemon.log().count(f"NOT_SERVING: events cannot be captured: {why}") == 1
                self.wait_for_status(notifications, f"STATUS=cannot capture: {why}")
                with Client(daemon.target) as client:
                    assert client.info().engine in {"bpf", "ftrace"}
            assert (next(watch).status, next(whole).status) == (SERVING, SERVING)
            assert daemon.log().count("SERVING: events can be captured again") == 1
            self.wait_for_status(notifications, f"STATUS=serving on {daemon.target}")
            watch.cancel()
            whole.cancel()
        with Recorder(daemon.target, f"{TICKER}:tick()", pids=[ticker.pid]) as recorder:
            ticker.do("fire 3")
        assert len(recorder.events) == 3

    @staticmethod
    def wait_for_status(notifications: socket.socket, status: str) -> None:
        while status not in notifications.recv(4096).decode().splitlines():
            pass


def test_metrics_on_loopback(tmp_path: Path) -> None:
    config = tmp_path / "stapsdtd.toml"
    with held_port() as port:
        config.write_text(f'[metrics]\nlisten = "tcp:127.0.0.1:{port}"\n')
        with running_daemon(tmp_path, "--config", str(config)) as daemon:
            url = f"http://127.0.0.1:{port}/metrics"
            with socket.create_connection(("127.0.0.1", port), 20) as connection:
                connection.sendall(f"GET {url} HTTP/1.0\r\n\r\n".encode())
                assert connection.recv(65536).startswith(b"HTTP/1.0 200 ")
            assert f"metrics are on tcp:127.0.0.1:{port}" in daemon.log()
            assert not stapsdt(daemon.target, "info").stderr


def test_no_metrics_unless_they_are_wanted(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        names = []
        for task in os.listdir(f"/proc/{daemon.pid}/task"):
            # some of gRPC's threads come and go
            with suppress(FileNotFoundError, ProcessLookupError):
                names.append(Path(f"/proc/{daemon.pid}/task/{task}/comm").read_text())
        assert names
        assert not [name for name in names if "metrics" in name]
