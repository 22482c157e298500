"""Daemons that are killed at the worst moment. strace kills them in a system call of its choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.client import Client, ClientError, EventBatch, SubscribeOptions
from stapsdtd.kernel import procfs
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.kernel.recovery import bystander, is_traced, is_unpatched, selector
from tests.support import Daemon, Ticker, injected, is_dead, wait_for

pytestmark = pytest.mark.kernel

_TRACING = "/sys/kernel/tracing"
_MOST_STEPS = 12


@pytest.fixture
def foreign(tracefs: Tracefs, ticker_program: Path) -> Iterator[None]:
    with bystander(tracefs, ticker_program):
        yield


def owner_of(daemon: Daemon) -> Owner:
    stat = procfs.stat(daemon.pid)
    assert stat is not None
    return Owner(procfs.pid_namespace(), daemon.pid, stat.key.start_ticks)


def files_of(daemon: Daemon, kind: str) -> tuple[str, ...]:
    """What a kind of system calls that arm and disarm is about; empty for those that are told by their name."""
    if kind == "definitions":
        return (f"{_TRACING}/uprobe_events",)
    if kind != "switches":
        return ()
    owner = owner_of(daemon)
    base = f"{_TRACING}/instances/{owner.instance(1)}"
    switches = [f"{base}/events/{owner.group}/e{n}_{owner.group.removeprefix('stapsdtd_')}/enable" for n in range(3)]
    return (f"{base}/trace_clock", f"{base}/buffer_size_kb", *switches)


def subscribe_and_unsubscribe(daemon: Daemon, program: Path, pids: Sequence[int]) -> None:
    with Client(daemon.target, timeout_seconds=10) as client, suppress(ClientError):
        client.subscribe(selector(program, "*"), SubscribeOptions(pids=pids)).unsubscribe()


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(
    ("engine", "kind", "is_scoped"),
    [
        ("bpf", "definitions", True),
        ("bpf", "perf_event_open", True),
        ("bpf", "bpf", True),
        ("bpf", "bpf", False),
        ("ftrace", "definitions", False),
        ("ftrace", "switches", False),
        ("ftrace", "mkdir", False),
        ("ftrace", "rmdir", False),
    ],
    indirect=["engine"],
)
def test_killed_in_any_step_of_arming_and_disarming(
    own_daemon: Daemon, ticker: Ticker, ticker_program: Path, tracefs: Tracefs, *, kind: str, is_scoped: bool
) -> None:
    """The first call of a kind kills it, after a restart the second one, and so on, until none is left that could.

    The bpf engine defines events for processes alone, where the kernel has links for all of them.
    """
    for number in range(1, _MOST_STEPS):
        files = files_of(own_daemon, kind)
        with injected(own_daemon.pid, "write" if files else kind, f"signal=KILL:when={number}", *files):
            subscribe_and_unsubscribe(own_daemon, ticker_program, [ticker.pid] if is_scoped else [])
            # the events go in the background
            wait_for(
                lambda: is_dead(own_daemon.pid) or own(tracefs, own_daemon.pid) == [], "a daemon that is dead or done"
            )
        if not is_dead(own_daemon.pid):
            break
        own_daemon.process.wait()
        dead = own_daemon.pid
        own_daemon.restart()
        assert own(tracefs, dead) == []
        is_unpatched(own_daemon, ticker, ticker_program)
    else:
        pytest.fail(f"{_MOST_STEPS} times it was killed, and there is more to kill it in")
    assert number > 1
    is_traced(own_daemon, ticker, ticker_program)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("phase", ["idle", "streaming"])
def test_killed_while(own_daemon: Daemon, phase: str, ticker: Ticker, ticker_program: Path, tracefs: Tracefs) -> None:
    with ExitStack() as stack:
        if phase == "streaming":
            client = stack.enter_context(Client(own_daemon.target))
            events = stack.enter_context(closing(client.subscribe(selector(ticker_program, "*")).messages()))
            ticker.begin("threads 4 200000")
            assert any(isinstance(message, EventBatch) for message in events)
        own_daemon.kill()
        dead = own_daemon.pid
        own_daemon.restart()
        assert own(tracefs, dead) == []
        if phase == "streaming":
            ticker.finish()
    is_unpatched(own_daemon, ticker, ticker_program)
    is_traced(own_daemon, ticker, ticker_program)
