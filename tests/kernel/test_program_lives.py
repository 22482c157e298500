"""Programs that execute, fork, are killed or replaced while they are traced."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from stapsdtd.client import Client, Event
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.kernel.recovery import NOP, selector
from tests.support import (
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    children,
    compile_target,
    is_dead,
    mapped_bytes,
    semaphores,
    wait_for,
)

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="session")
def changing_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    return compile_target("churning.c", folder / "changing", "-DPROVIDER=changing", "-ldl", "-lpthread")


def changing(program: Path, name: str = "beat(arg0, arg1)") -> str:
    return f"changing:{program}::{name}"


@pytest.mark.alone
def test_processes_are_killed_in_the_middle_of_their_hits(
    daemon: Daemon, engine: str, ticker: Ticker, ticker_program: Path
) -> None:
    """Of each thread everything came up to its end, and a hit that was cut short holds nothing up."""
    # the ring of one CPU has room for all that a process fires, of which ftrace's takes what is filtered later too
    hits = 10_000_000 if engine == "bpf" else 500_000
    with Recorder(
        daemon.target, selector(ticker_program, "tick(arg0)"), where="arg0 & 63 == 0", kernel_buffer_kib=65536
    ) as recorder:

        def has_come(ticker: Ticker, before: int) -> bool:
            return any(event.pid == ticker.pid for event in recorder.events[before:])

        for _ in range(15):
            before = len(recorder.events)
            with Ticker(ticker_program) as doomed:
                doomed.begin(f"threads 3 {hits}")
                wait_for(partial(has_come, doomed, before), "its first events")
            # which comes behind all of its events, so that the next one finds empty rings
            ticker.do("fire 1")
            wait_for(partial(has_come, ticker, before), "an event of another process")
    account = recorder.finish()
    assert account.lost == 0
    assert account.delivered == len(recorder.events)
    assert account.delivered <= account.filtered // 63 + 15 + 3 * 15
    by_thread: dict[int, list[object]] = {}
    for event in recorder.events:
        by_thread.setdefault(event.tid, []).append(event.values[0])
    assert by_thread.pop(ticker.pid) == [0] * 15
    assert len(by_thread) > 15
    assert any(len(values) < hits // 64 for values in by_thread.values()), "all were killed too late"
    for values in by_thread.values():
        assert values == list(range(0, 64 * len(values), 64))
    assert ticker.semaphore == 0


@pytest.mark.parametrize("scope", ["everybody", "one process"])
def test_exec_while_attached(daemon: Daemon, engine: str, changing_program: Path, tmp_path: Path, scope: str) -> None:
    other = Path(shutil.copy(changing_program, tmp_path / "other"))
    with Ticker(changing_program) as first, Ticker(other) as second:
        pids = [] if scope == "everybody" else [first.pid]
        with Recorder(daemon.target, changing(changing_program), changing(other), pids=pids) as recorder:
            first.do("fire 1 100")
            assert first.do(f"exec {changing_program}") == 1
            first.do("fire 2 100")
            first.do(f"exec {other}")
            wait_for(lambda: first.do("semaphores") == 1, "the other program to be armed in it")
            first.do("fire 3 100")
            # the ftrace engine arms files, not processes
            assert second.do("fire 4 100") == (scope == "everybody" or engine == "ftrace")
        assert first.do("semaphores") == second.do("semaphores") == 0
    account = recorder.finish()
    numbers = range(1, 4 if pids else 5)
    assert recorder.values() == [(value, number) for number in numbers for value in range(100)]
    assert account.lost == 0
    assert account.delivered == 100 * len(numbers)


@pytest.mark.parametrize("scope", ["everybody", "one process"])
def test_fork_with_semaphores(daemon: Daemon, changing_program: Path, scope: str) -> None:
    """Children are born with what their parent has in memory: breakpoints, and semaphores that are up."""
    with Ticker(changing_program) as parent:
        pids = [] if scope == "everybody" else [parent.pid]
        with Recorder(daemon.target, changing(changing_program), pids=pids, kernel_buffer_kib=16384) as recorder:
            for number in range(10):
                assert parent.do(f"forks 4 {number} 100") == 1
                parent.do(f"fire {number} 100")
        assert parent.do("semaphores") == 0
        assert parent.do("forks 4 0 10") == 0
    account = recorder.finish()
    own_events = [event for event in recorder.events if event.pid == parent.pid]
    assert len(own_events) == 1000
    assert account.lost == 0
    assert account.delivered == len(recorder.events) == (5000 if scope == "everybody" else 1000)


@pytest.mark.parametrize("scope", ["everybody", "one process"])
def test_child_that_outlives_the_subscription_has_its_semaphores_down(
    daemon: Daemon, changing_program: Path, scope: str
) -> None:
    with Ticker(changing_program) as parent:
        pids = [] if scope == "everybody" else [parent.pid]
        with Recorder(daemon.target, changing(changing_program), pids=pids):
            assert parent.do("fork") == 1
            (child,) = children(parent.pid)
            with Client(daemon.target) as client:
                probes = client.list_probes(changing(changing_program, "*"), pids=[child]).probes
            assert len(probes) == 2
        assert not any(semaphores(child, probes).values())
        for probe in probes:
            assert mapped_bytes(child, probe.path, probe.sites[0].offset, 1, "x") == NOP
        assert parent.do("semaphores") == 0


IN_A_MOUNT_NAMESPACE = """
mount --make-rprivate / && mount -t tmpfs none "$0" && cp "$1" "$2" "$0" && exec "$0/${1##*/}"
"""


@pytest.mark.parametrize("where", ["on the host", "in a mount namespace"])
def test_process_outlives_its_main_thread(
    daemon: Daemon, ticker_program: Path, library: Path, tmp_path: Path, where: str
) -> None:
    """What it maps only then is listed and traced, too: /proc/PID shows no memory any more, but a thread does."""
    late = Path(shutil.copy(library, tmp_path / f"late{os.getpid()}.so"))
    command: list[Path | str] = [ticker_program]
    if where == "in a mount namespace":
        inside = tmp_path / "inside"
        inside.mkdir()
        command = ["unshare", "-m", "sh", "-c", IN_A_MOUNT_NAMESPACE, inside, ticker_program, late]
        late = inside / late.name
    with (
        Ticker(*command) as ticker,
        Client(daemon.target) as client,
        Recorder(daemon.target, f"{TICKER}:tick(arg0)", f":{late}::called(arg0)") as recorder,
    ):
        ticker.begin("leave")
        wait_for(lambda: is_dead(ticker.pid), "the main thread to end")
        ticker.do("fire 2")
        ticker.do(f"open {late}")
        wait_for(lambda: any(each.path == str(late) for each in recorder.armed()), "the library to be armed")
        ticker.do("call 3")
        (probe,) = client.list_probes(f":{late}::called", pids=[ticker.pid]).probes
        assert probe.pids == (ticker.pid,)
        wait_for(lambda: len(of_process(recorder, ticker.pid)) == 5, "all events")
        assert recorder.finish().lost == 0


def of_process(recorder: Recorder, pid: int) -> list[Event]:
    return [event for event in recorder.events if event.pid == pid]


def test_file_is_replaced_while_armed(daemon: Daemon, ticker_program: Path, tmp_path: Path, tracefs: Tracefs) -> None:
    """As a package manager does: who runs the old one is traced on, who starts the new one too."""
    program = Path(shutil.copy(ticker_program, tmp_path / "program"))
    with Ticker(program) as old, Recorder(daemon.target, selector(program, "tick(arg0)")) as recorder:
        for upgrade in range(3):
            os.rename(shutil.copy(ticker_program, tmp_path / "upgrade"), program)
            assert old.do("fire 2") == 1
            wait_for(lambda count=5 * upgrade + 2: len(recorder.events) == count, "the old one's events")  # type: ignore[misc]
            with Ticker(program) as new:
                wait_for(lambda count=upgrade + 2: len(recorder.armed()) == count, "the new one")  # type: ignore[misc]
                assert new.do("fire 3") == 1
                wait_for(lambda count=5 * upgrade + 5: len(recorder.events) == count, "its events")  # type: ignore[misc]
        account = recorder.finish()
        assert old.semaphore == 0
    assert [value for (value,) in recorder.values()] == [0, 1, 0, 1, 2] * 3
    assert (account.fired, account.delivered) == (15, 15)
    wait_for(lambda: own(tracefs, daemon.pid) == [], "all to be disarmed")
