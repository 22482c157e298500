"""Hits that find a page missing: they never wait, never come out as another's, and lack a value at the most."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Aggregate, Client
from tests.support import Daemon, Recorder, compile_target, wait_for

pytestmark = pytest.mark.kernel

HITS = 25_000
LONELY = "only the probe names it", -1234567890123


@pytest.fixture
def engine() -> str:
    return "bpf"


@pytest.fixture(scope="session")
def cold_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_target("cold.c", tmp_path_factory.mktemp("targets") / "cold")


@contextmanager
def cold(program: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to fire at a line of input."""
    process = subprocess.Popen(
        [str(program), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def fire_again(process: subprocess.Popen[str]) -> None:
    begin(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "fired\n"


def test_sums_know_constants_that_are_not_in_memory(daemon: Daemon, cold_program: Path) -> None:
    """Of several subscriptions with one filter, each counts a hit once, whoever lacks what."""
    selector = f":{cold_program}::constant"
    wanted = [
        Aggregate(by=["arg0:str"]),
        Aggregate(by=["buf(arg0, 8)"]),
        Aggregate(functions=["count", "sum", "quantize"], value="arg1", by=["arg2"]),
        Aggregate(functions=["count", "sum"], value="arg2"),
        Aggregate(),
    ]
    with ExitStack() as stack:
        client = stack.enter_context(Client(daemon.target))
        firing = stack.enter_context(cold(cold_program, "constant", 40))
        subscriptions = [client.aggregate(selector, each) for each in wanted]
        recorder = stack.enter_context(Recorder(daemon.target, f"{selector}(arg0:str)"))
        begin(firing)
        until_done([firing])
        accounts = [each.unsubscribe() for each in subscriptions]
        by_text, by_bytes, by_number, total, count = [next(each.snapshots()).rows for each in subscriptions]
    assert [(each.fired, each.aggregated, each.lost) for each in accounts] == [(40, 40, 0)] * 5
    text, number = LONELY
    assert [(row.key, row.values) for row in by_text] == [((text,), {"count": 40})]
    assert [(row.key, row.values) for row in by_bytes] == [((text[:8].encode(),), {"count": 40})]
    assert sorted((row.key[0], row.values["sum"]) for row in by_number) == [(each, number) for each in range(40)]
    assert [row.values for row in total] == [{"count": 40, "sum": sum(range(40))}]
    assert [row.values for row in count] == [{"count": 40}]
    assert recorder.values() == [(text,)] * 40


def until_done(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == f"done {process.pid}\n"


def test_cold_hits_beside_warm_ones_on_one_cpu(daemon: Daemon, cold_program: Path) -> None:
    selectors = [f":{cold_program}::{name}(arg0,arg1:str,arg2)" for name in ("string", "warm")]
    with ExitStack() as stack:
        warm = stack.enter_context(cold(cold_program, "warm"))
        recorder = stack.enter_context(Recorder(daemon.target, *selectors, queue_bytes=256 << 20))
        begin(warm)
        for _ in range(4):
            firing = stack.enter_context(cold(cold_program, "strings", HITS))
            begin(firing)
            until_done([firing])
        begin(warm)
        until_done([warm])
    account = recorder.finish()
    assert (account.lost_decode, account.in_flight) == (0, 0)
    assert [event for event in recorder.events if event.values[2] != event.pid] == []
    of_strings = [event for event in recorder.events if event.probe.name == "string"]
    assert account.lost_kernel_buffer + len(of_strings) >= 4 * HITS
    assert {event.values[1] for event in of_strings} <= {None, *(f"cold-{number}" for number in range(HITS))}
    assert all(event.values[1] in {None, f"cold-{event.values[0]!r}"} for event in of_strings)
    assert {event.values[1] for event in recorder.events if event.probe.name == "warm"} == {"warm"}
    assert account.fired == len(recorder.events) + account.lost_kernel_buffer + account.lost_queue


def test_constants_that_only_the_probe_names(daemon: Daemon, cold_program: Path) -> None:
    with (
        cold(cold_program, "constant", 1000) as firing,
        Recorder(daemon.target, f":{cold_program}::constant(arg0:str,arg1,arg2)") as recorder,
    ):
        begin(firing)
        until_done([firing])
    assert recorder.values() == [(*LONELY, number) for number in range(1000)]


def test_a_page_is_brought_in_for_the_next_hit(daemon: Daemon, cold_program: Path, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("from a file that nobody had read")
    with (
        cold(cold_program, "again", file) as firing,
        Recorder(daemon.target, f":{cold_program}::again(arg0:str)") as recorder,
    ):
        begin(firing)

        def has_text() -> bool:
            fire_again(firing)
            return ("from a file that nobody had read",) in recorder.values()

        wait_for(has_text, "a hit that finds the page")
    values = [value for (value,) in recorder.values()]
    assert values[0] is None
    assert set(values) == {None, "from a file that nobody had read"}
