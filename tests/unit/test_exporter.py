"""Metrics over HTTP, on unix and loopback sockets: who gets them, and what clients cannot do."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stapsdtd.api.listeners import CannotListenError
from stapsdtd.config import Listener
from stapsdtd.metrics.exporter import Exporter
from tests.support import held_port, wait_for

pytestmark = pytest.mark.timeout(60)

PATIENCE_SECONDS = 20


class Sample(Collector):
    def __init__(self) -> None:
        self.collected = 0
        self.failure: Exception | None = None

    def collect(self) -> Iterator[Metric]:
        self.collected += 1
        if self.failure is not None:
            raise self.failure
        yield GaugeMetricFamily("sample", "A sample.", self.collected)


@pytest.fixture
def sample() -> Sample:
    return Sample()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metrics.sock")


@contextmanager
def exporting(sample: Sample, path: str, seconds: float = PATIENCE_SECONDS) -> Iterator[Exporter]:
    exporter = Exporter(Listener(f"unix:{path}", mode=0o660), sample, seconds)
    try:
        yield exporter
    finally:
        exporter.close()


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect(path)
    return connection


def ask(connection: socket.socket, request: str = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> str:
    with connection:
        connection.sendall(request.encode())
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer.decode()


def is_read(connection: socket.socket) -> bool:
    """Report whether the other end has read everything."""
    return fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) == bytes(4)


def test_metrics_are_collected_when_they_are_asked_for(sample: Sample, path: str) -> None:
    with exporting(sample, path) as exporter:
        assert exporter.address == f"unix:{path}"
        assert sample.collected == 0
        for number in (1.0, 2.0):
            head, body = ask(connect(path)).split("\r\n\r\n", 1)
            assert head.startswith("HTTP/1.0 200 OK\r\n")
            assert "text/plain; version=" in head
            assert f"sample {number}\n" in body
            assert "process_resident_memory_bytes" in body
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
    assert not os.path.exists(path)


def test_nothing_else_is_there(sample: Sample, path: str) -> None:
    with exporting(sample, path):
        assert ask(connect(path), "GET / HTTP/1.0\r\n\r\n").startswith("HTTP/1.0 404 ")
        assert ask(connect(path), "POST /metrics HTTP/1.0\r\n\r\n").startswith("HTTP/1.0 501 ")
        assert " 400 " in ask(connect(path), "\x00nonsense \xff\r\n\r\n")
    assert sample.collected == 0


def test_tcp(sample: Sample) -> None:
    with held_port() as port:
        exporter = Exporter(Listener(f"tcp:127.0.0.1:{port}"), sample)
        try:
            assert "sample 1.0\n" in ask(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))
        finally:
            exporter.close()


def test_path_that_is_served_is_not_taken(sample: Sample, path: str) -> None:
    with exporting(sample, path), pytest.raises(CannotListenError, match="another stapsdtd serves it"):
        Exporter(Listener(f"unix:{path}"), sample)


def test_silent_client_keeps_others_waiting_no_longer_than_the_deadline(sample: Sample, path: str) -> None:
    with exporting(sample, path, seconds=2), connect(path) as silent:
        assert "sample 1.0\n" in ask(connect(path))
        assert silent.recv(1) == b""


def test_client_that_sends_a_byte_now_and_then_is_hung_up_on(sample: Sample, path: str) -> None:
    with exporting(sample, path, seconds=2), connect(path) as slow:

        def send() -> bool:
            time.sleep(0.02)
            try:
                slow.send(b"G")
            except BrokenPipeError:
                return True
            return False

        wait_for(send, "the client to be hung up on")
        assert "sample 1.0\n" in ask(connect(path))


def test_client_that_leaves_or_never_reads_harms_nobody(
    sample: Sample, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(sample, path):
        for _ in range(3):
            with connect(path) as leaving:
                leaving.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert "sample " in ask(connect(path))
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_collector_that_fails_is_logged_and_the_next_request_is_served(
    sample: Sample, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(sample, path):
        sample.failure = RuntimeError("changed size")
        assert ask(connect(path)) == ""
        sample.failure = None
        assert "sample 2.0\n" in ask(connect(path))
    assert "cannot collect metrics" in caplog.text


def test_closing_waits_for_no_client(sample: Sample, path: str) -> None:
    exporter = Exporter(Listener(f"unix:{path}"), sample, PATIENCE_SECONDS)
    with connect(path) as silent:
        silent.send(b"G")
        wait_for(lambda: is_read(silent), "the connection to be served")
        begin = time.monotonic()
        exporter.close()
        assert time.monotonic() - begin < PATIENCE_SECONDS / 2
        assert silent.recv(1) == b""
        assert "stapsdtd-metrics" not in {thread.name for thread in threading.enumerate()}
