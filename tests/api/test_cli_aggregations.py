"""`stapsdt count` and the like as their own processes, against a server whose engine a test plays."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from stapsdtd.events.batch import EventBatch
from tests.api.commands import Start, finish, starting
from tests.api.fake_server import serving
from tests.api.served import Served, processes
from tests.unit.samples import argument, batch, signed, site, strings


@pytest.fixture(scope="module")
def pids() -> Iterator[list[int]]:
    with processes(1) as started:
        yield started


@pytest.fixture
def start(server: Served, pids: list[int]) -> Iterator[Start]:
    server.map(pids[0], server.file_object(site("call", 1, [argument(signed=True), argument()])))
    with starting("--server", f"unix:{server.socket}") as start:
        yield start


def statements(values: list[int], texts: list[bytes]) -> EventBatch:
    """Hits of site 1 that tell of arg1, a string, and then of arg0."""
    return batch(range(len(values)), strings(*texts), signed(*values))


def shown_after(server: Served, process: Any, *batches: EventBatch) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what a command prints as JSON, and its messages."""
    server.wait_until_streaming()
    server.fire(*batches)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 0, err
    return [json.loads(line) for line in out], err


def test_json_of_statements_without_their_literals(server: Served, start: Start) -> None:
    process = start("stats", "app:call", "arg0", "--by", "arg1:str", "--normalize", "sql", "--json")
    texts = [b"SELECT 1", b"SELECT 22", b"SELECT 333", b"COMMIT"]
    rows, _ = shown_after(server, process, statements([0, 3, -6, 7], texts))
    assert rows == [
        {"key": ["SELECT ?"], "count": 3, "avg": -1.0, "min": -6, "max": 3, "sum": -3},
        {"key": ["COMMIT"], "count": 1, "avg": 7.0, "min": 7, "max": 7, "sum": 7},
    ]


def test_buffer_is_asked_for() -> None:
    with serving() as fake, starting("--server", fake.target) as start:
        process = start("count", "postgresql:query__start", "--buffer", "256")
        fake.wait_for("SubscribeRequest")
        process.kill()
        (request,) = fake.asked("SubscribeRequest")
    assert request.kernel_buffer_kib == 256
