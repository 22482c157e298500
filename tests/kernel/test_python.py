from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import pytest

from stapsdtd.client import Client, Event, Span, SubscribeOptions
from tests.support import (
    SYSTEM_PYTHON,
    TARGETS,
    Daemon,
    Recorder,
    armed_semaphores,
    notes_in,
    require,
    semaphores,
    stapsdt,
    wait_for,
)

pytestmark = pytest.mark.kernel

NAMES = {
    "audit",
    "function__entry",
    "function__return",
    "gc__done",
    "gc__start",
    "import__find__load__done",
    "import__find__load__start",
    "line",
}


class Script:
    """One of tests/targets/python_*.py under the system's interpreter, ready and waiting for `go`."""

    def __init__(self, name: str) -> None:
        # -S -I: nothing but the script; -X utf8: also where the locale is C
        self._process = subprocess.Popen(
            [SYSTEM_PYTHON, "-S", "-I", "-X", "utf8", str(TARGETS / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> Any:
        """Let it do its work; answer its own record of it."""
        output, _ = self._process.communicate("go\n")
        assert self._process.returncode == 0
        return json.loads(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(autouse=True)
def _python() -> None:
    require(os.path.exists(SYSTEM_PYTHON), SYSTEM_PYTHON)


@pytest.fixture
def calls() -> Iterator[Script]:
    with Script("python_calls.py") as script:
        yield script


@pytest.fixture
def events() -> Iterator[Script]:
    with Script("python_events.py") as script:
        yield script


@pytest.mark.alone
def test_own_commands_leave_no_events_in_a_trace_of_their_interpreter(daemon: Daemon) -> None:
    """Their imports come before they connect. The interpreter is found as this process maps it."""
    imports = "python:import__find__load__start"
    with Client(daemon.target) as client:
        require(client.list_probes(imports, pids=[os.getpid()]).probes, "an interpreter with probes")
        with (
            Recorder(daemon.target, imports) as recorder,
            Recorder(daemon.target, imports, include_clients=True) as everything,
        ):
            stapsdt(daemon.target, "list")
            wait_for(lambda: any(event.comm == "stapsdt" for event in everything.events), "them to be delivered")
    fired = sum(event.comm == "stapsdt" for event in everything.events)
    assert not [event for event in recorder.events if event.comm == "stapsdt"]
    account = recorder.account
    assert account is not None
    assert account.filtered >= fired > 20
    assert account.lost == 0


def test_all_eight_are_listed_and_armed_together(daemon: Daemon, events: Script) -> None:
    with Client(daemon.target) as client:
        listing = client.list_probes(["python:*"], pids=[events.pid], details=True)
    assert listing.problems == ()
    assert {probe.path for probe in listing} == {os.path.realpath(SYSTEM_PYTHON)}
    assert {probe.name for probe in listing} == NAMES
    assert sum(len(probe.sites) for probe in listing) == notes_in(SYSTEM_PYTHON) == 8
    assert semaphores(events.pid, listing) == Counter()
    with Recorder(daemon.target, "python:*", pids=[events.pid]) as recorder:
        assert {status.name for status in recorder.armed()} == NAMES
        assert len(recorder.statuses) == 8
        assert semaphores(events.pid, listing) == armed_semaphores(listing)
    assert semaphores(events.pid, listing) == Counter()


@pytest.mark.parametrize("by_selector", [False, True])
def test_every_call_is_told_with_file_function_and_line(daemon: Daemon, calls: Script, by_selector: bool) -> None:
    suffix, pids = (f"{calls.pid}::", []) if by_selector else ("", [calls.pid])
    with Recorder(daemon.target, f"python{suffix}:function__*(arg0:str, arg1:str, arg2)", pids=pids) as recorder:
        record = calls.go()
    kinds = {"function__entry": "call", "function__return": "return"}
    told = [[kinds[event.probe.name], *event.values] for event in recorder.events]
    assert [event for event in told if event[0] == "call"] == [event for event in record if event[0] == "call"]
    # returns are told outside the record too: before it, after it, and of the function that writes it
    begin = next(position for position, event in enumerate(told) if event[0] == "call")
    assert [event for event in told[begin:] if event[2] != "note"][: len(record)] == record
    assert len(record) > 800
    assert recorder.finish().lost == 0


def test_pauses_of_the_collector_are_those_that_it_tells_of(daemon: Daemon, events: Script) -> None:
    span = Span(start_selectors=["python:gc__start(arg0)"])
    with (
        Client(daemon.target) as client,
        client.subscribe("python:gc__done(arg0)", SubscribeOptions(pids=[events.pid]), span) as subscription,
    ):
        record = events.go()
        subscription.unsubscribe()
        pairs = [event.values for event in subscription.events()]
    assert [[generation, collected] for collected, generation, _ in pairs] == record["collected"]
    assert all(isinstance(elapsed, int) and elapsed > 0 for _, _, elapsed in pairs)


def test_each_of_the_eight_fires_with_its_values(daemon: Daemon, events: Script) -> None:
    selectors = (
        "python:function__*(arg0:str, arg1:str, arg2)",
        "python:line(arg0:str, arg1:str, arg2)",
        "python:audit(arg0:str)",
        "python:import__find__load__start(arg0:str)",
        "python:import__find__load__done(arg0:str, arg1)",
        "python:*",
    )
    with Recorder(daemon.target, *selectors, pids=[events.pid]) as recorder:
        record = events.go()

    def told(*names: str) -> list[Event]:
        return [event for event in recorder.events if event.probe.name in names]

    assert {event.probe.name for event in recorder.events} == NAMES
    assert [value for event in told("gc__start", "gc__done") for value in event.values] == [
        value for generation_and_count in record["collected"] for value in generation_and_count
    ]
    assert [event.values[0] for event in told("audit")] == ["sys.addaudithook", *record["audited"]]
    assert [event.values for event in told("import__find__load__start", "import__find__load__done")] == [
        ("bisect",),
        ("_bisect",),
        ("_bisect", 1),
        ("bisect", 1),
        ("there_is_no_such_module",),
        ("there_is_no_such_module", 0),
    ]
    script = str(TARGETS / "python_events.py")
    walked = [event.values for event in told("line") if event.values[:2] == (script, "walk")]
    assert walked == [(script, "walk", line) for line in record["lines"]]
    assert len(walked) > 30
    calls = [event for event in told("function__entry", "function__return") if event.values[:2] == (script, "walk")]
    assert [(event.probe.name, event.values[2]) for event in calls] == [
        ("function__entry", record["lines"][0] - 1),
        ("function__return", record["lines"][-1]),
    ]
    account = recorder.finish()
    assert (account.lost, account.delivered) == (0, len(recorder.events))
