"""The opener of perf events: it serves where the kernel needs it, and is not there elsewhere."""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState, SubscribeOptions
from tests.installed import machine
from tests.installed.machine import ALICE, FIRE, FOR_EVER
from tests.waiting import wait_for

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

HITS = 500
_SOCKET = "stapsdtd-opener.socket"
_SYS_ADMIN = 1 << 21

_IS_NEEDED = tuple(map(int, platform.release().split(".")[:2])) < (6, 10)
where_needed = pytest.mark.skipif(not _IS_NEEDED, reason="this kernel's links to uprobes need no perf events")
elsewhere = pytest.mark.skipif(_IS_NEEDED, reason="this kernel needs perf events")


def pids() -> list[int]:
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/comm")
        if path.exists() and path.read_text().strip() == "stapsdtd-opener"
    ]


def kill() -> None:
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not pids(), "the opener to end")


def count_by_pid() -> int:
    """Return how often a running program of alice's fires, which is armed by a perf event of its own."""
    with machine.running(FIRE, str(HITS), "1", "1", user=ALICE) as fire:
        return machine.count("--pid", str(fire.pid), user=ALICE)


def why_refused() -> str:
    """Return why a program cannot be armed by its pid; nothing if it can."""
    with machine.running(FIRE, str(HITS), "1", "1", user=ALICE) as fire, Client(machine.SERVER) as client:
        wait_for(lambda: client.list_probes(["heldout:hit"], pids=[fire.pid]).probes, "the program to be known")
        subscription = client.subscribe("heldout:hit", SubscribeOptions(pids=[fire.pid]))
        (site,) = subscription.sites
        subscription.unsubscribe()
        assert (site.state is SiteState.REFUSED) == bool(site.reason)
        return site.reason


def mapping_records() -> str:
    rows = map(json.loads, machine.run("stapsdt", "doctor", "--json", check=False).stdout.splitlines())
    return next(str(row) for row in rows if row["name"] == "mapping records")


@where_needed
def test_perf_events_come_through_it() -> None:
    assert count_by_pid() == HITS
    assert "through stapsdtd-opener" in mapping_records()


@where_needed
def test_it_has_one_capability_and_a_filter_of_its_own() -> None:
    assert count_by_pid() == HITS
    (pid, *_) = pids()
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    for name in ("CapBnd", "CapPrm", "CapEff"):
        assert int(status[name], 16) == _SYS_ADMIN
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["Seccomp_filters"]) > 1
    machine.run("stapsdt", "info", user=ALICE)
    for path in ("/run/stapsdtd-opener", "/run/stapsdtd-opener/opener.sock"):
        assert machine.run("ls", path, user=ALICE, check=False).returncode


@where_needed
def test_killed_it_comes_back_and_what_is_armed_stays() -> None:
    with (
        machine.running(FIRE, FOR_EVER, user=ALICE) as fire,
        machine.tracing("count", "heldout:hit", "--json", "--pid", str(fire.pid), user=ALICE) as counting,
    ):
        wait_for(lambda: machine.semaphore(fire.pid) == 1, "the program to be armed")
        kill()
        assert machine.semaphore(fire.pid) == 1
        assert machine.counted(counting.interrupt()) > 0
    assert count_by_pid() == HITS


@where_needed
def test_without_it_the_reason_and_the_remedies_are_told() -> None:
    machine.systemctl("stop", _SOCKET)
    kill()
    reason = why_refused()
    assert "kernel.perf_event_paranoid = 3" in reason
    assert "CAP_SYS_ADMIN" in reason
    assert f"systemctl start {_SOCKET}" in reason
    assert "sysctl kernel.perf_event_paranoid=2" in reason
    machine.systemctl("start", _SOCKET)
    assert not why_refused()


@contextmanager
def paranoid(value: int) -> Iterator[None]:
    setting = Path("/proc/sys/kernel/perf_event_paranoid")
    before = setting.read_text()
    setting.write_text(f"{value}\n")
    try:
        yield
    finally:
        setting.write_text(before)


@where_needed
def test_with_the_setting_it_is_not_asked() -> None:
    with paranoid(2):
        kill()
        assert count_by_pid() == HITS
        assert not pids()


@where_needed
def test_it_stops_with_the_daemon() -> None:
    assert count_by_pid() == HITS
    machine.systemctl("stop", machine.SERVICE)
    wait_for(lambda: machine.show("ActiveState", _SOCKET) == "inactive", "its socket to be closed")
    wait_for(lambda: not pids(), "its processes to end")
    machine.systemctl("start", machine.SERVICE)
    assert machine.show("ActiveState", _SOCKET) == "active"


@elsewhere
def test_it_is_not_there() -> None:
    assert machine.show("ActiveState", _SOCKET) == "inactive"
    assert count_by_pid() == HITS
    assert not pids()
