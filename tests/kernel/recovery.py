"""What holds of a daemon and its programs once a fault is over: all works, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stapsdtd.client import Client, SiteState
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import TICKER, Daemon, Recorder, Ticker, mapped_bytes, semaphores, wait_for

NOP, BREAKPOINT = b"\x90", b"\xcc"


def selector(program: Path | str, name: str) -> str:
    return f"{TICKER}:{program}::{name}"


def is_traced(daemon: Daemon, ticker: Ticker, program: Path) -> None:
    """A daemon serves as if nothing had been, and lets go of what it armed."""
    with Recorder(daemon.target, selector(program, "tick(arg0)")) as recorder:
        assert [status.state for status in recorder.sites] == [SiteState.ARMED]
        assert ticker.do("fire 3") == 1
    assert recorder.values() == [(0,), (1,), (2,)]
    assert recorder.finish().lost == 0
    # on a busy host the subscription may have ended as "still disarming"
    wait_for(lambda: ticker.semaphore == 0, "the semaphore to fall")


def is_unpatched(daemon: Daemon, ticker: Ticker, program: Path) -> None:
    """No breakpoint and no semaphore is left in a process."""
    with Client(daemon.target) as client:
        probes = client.list_probes(selector(program, "*")).probes
    assert len(probes) == 3
    for probe in probes:
        for site in probe.sites:
            assert mapped_bytes(ticker.pid, probe.path, site.offset, 1, "x") == NOP
    assert not any(semaphores(ticker.pid, probes).values())


@contextmanager
def bystander(tracefs: Tracefs, program: Path) -> Iterator[None]:
    """Another tool's event and instance, of the very same file and in use."""
    group = f"bystander_{os.getpid()}"
    tracefs.append_definition(f"p:{group}/event {program}:0x1100")
    tracefs.make_instance(group)
    tracefs.write(f"instances/{group}/events/{group}/event/enable", "1")
    yield
    assert tracefs.events(group) == ["event"]
    assert tracefs.read(f"instances/{group}/events/{group}/event/enable") == "1\n"
    tracefs.write(f"instances/{group}/events/{group}/event/enable", "0")
    tracefs.remove_instance(group)
    tracefs.append_definition(f"-:{group}/event")
