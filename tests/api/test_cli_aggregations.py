"""`stapsdt count` and the like as their own processes, against a server whose engine a test plays."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
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


SIGNATURES = """
provider = "app"
source = "its header"
versions = "1"
[enums.kind]
1 = "cash"
[[probes]]
name = "call"
text = "Somebody pays."
arguments = ["enum(kind) kind", "bool paid"]
"""


@pytest.fixture
def start(server: Served, pids: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "app.toml").write_text(SIGNATURES)
    monkeypatch.setenv("STAPSDT_SIGNATURES", str(tmp_path))
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


def test_keys_are_shown_by_what_they_mean(server: Served, start: Start) -> None:
    process = start("count", "app:cal*", "--by", "kind,paid", "--json")
    server.wait_until_streaming()
    server.fire(batch(range(3), signed(1, 1, 9), signed(1, 1, 0)))
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert status == 0, err
    assert [json.loads(line) for line in out] == [
        {"key": ["cash", True], "count": 2},
        {"key": [9, False], "count": 1},
    ]


def test_names_are_not_used_where_a_file_contradicts_them(server: Served, pids: list[int], start: Start) -> None:
    old = server.file_object(site("call", 1, [argument()]), name="old")
    server.map(pids[0], old, "old")
    status, _, err = finish(start("count", "app:call", "--by", "kind"))
    assert status != 0
    reason = "the probe has 1 argument, and the signature 2"
    assert err.count(f"stapsdt: app:call in {old.path}: its signature is not used: {reason}") == 1
    assert any("unknown name 'kind'" in line for line in err)


def test_buffer_is_asked_for() -> None:
    with serving() as fake, starting("--server", fake.target) as start:
        process = start("count", "postgresql:query__start", "--buffer", "256")
        fake.wait_for("SubscribeRequest")
        process.kill()
        (request,) = fake.asked("SubscribeRequest")
    assert request.kernel_buffer_kib == 256
