"""Scopes that follow processes: what these fork is traced from its first instruction, and nobody else is."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stapsdtd.client import Clause, Client, EndReason, LimitReachedError, SubscribeOptions, Subscription
from tests.support import (
    SYSTEM_PYTHON,
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    compile_target,
    running_daemon,
    semaphores,
    wait_for,
)
from tests.users import ANNE, BERT, public_folder

pytestmark = pytest.mark.kernel

_HITS = 100
TICK = f"{TICKER}:tick(arg0)"


@pytest.fixture(scope="session")
def family_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "family"
    return compile_target("family.c", output, f"-DPROVIDER={TICKER}", "-lpthread")


@pytest.mark.vm
@pytest.mark.parametrize("way", ["fork", "orphan", "thread", "new"])
def test_children_of_every_kind(daemon: Daemon, family_program: Path, way: str) -> None:
    with Ticker(family_program) as parent, Ticker(family_program) as stranger:
        with Recorder(daemon.target, TICK, pids=[parent.pid], follow=True) as recorder:
            for family in parent, stranger:
                family.do(f"{way} {_HITS}")
            assert parent.semaphore == 1
        assert parent.semaphore == 0
    assert [event.values[0] for event in recorder.events] == list(range(_HITS))
    assert {event.pid for event in recorder.events}.isdisjoint({parent.pid, stranger.pid})
    assert recorder.losses == []


def test_children_are_followed_for_each_clause(daemon: Daemon, family_program: Path) -> None:
    clauses = [Clause(tag=tag, selectors=[TICK]) for tag in ("one", "other")]
    with (
        Client(daemon.target) as client,
        Ticker(family_program) as parent,
        Ticker(family_program) as stranger,
        client.query(clauses, SubscribeOptions(pids=[parent.pid], follow=True)) as subscription,
    ):
        for family in parent, stranger:
            family.do(f"fork {_HITS}")
        subscription.unsubscribe()
        numbers = Counter((event.tag, event.values[0]) for event in subscription.events())
    assert numbers == dict.fromkeys(((tag, number) for tag in ("one", "other") for number in range(_HITS)), 1)


@pytest.mark.parametrize("way", ["exec", "vfork"])
def test_programs_that_children_execute(
    daemon: Daemon, family_program: Path, ticker_program: Path, tmp_path: Path, way: str
) -> None:
    programs = [Path(shutil.copy(ticker_program, tmp_path / f"program{number}")) for number in range(3)]
    paths = [str(path) for path in programs]
    with Ticker(family_program) as parent, Ticker(family_program) as stranger:
        with Recorder(daemon.target, TICK, pids=[parent.pid], follow=True, expected_files=paths) as recorder:
            for program in programs:
                stranger.do(f"{way} {program} {_HITS}")
                parent.do(f"{way} {program} {_HITS}")
        counts = Counter(event.probe.path for event in recorder.events)
        assert counts == dict.fromkeys(paths, _HITS)
        assert recorder.account is not None
        assert recorder.account.delivered == 3 * _HITS


@pytest.mark.parametrize(("way", "hits"), [("crowd 300", 600), ("relay 100", 500)])
def test_children_that_end_at_any_time_cost_no_hit_of_others(
    daemon: Daemon, family_program: Path, way: str, hits: int
) -> None:
    """Events that the kernel hands on to children would end with the wrong one."""
    with Ticker(family_program) as parent:
        with Recorder(daemon.target, TICK, pids=[parent.pid], follow=True, kernel_buffer_kib=8192) as recorder:
            parent.do(way)
        account = recorder.finish()
    assert (account.delivered, account.lost, len(recorder.events)) == (hits, 0, hits)


def test_strangers_that_run_the_same_program_are_not_in_scope(
    daemon: Daemon, ticker_program: Path, family_program: Path
) -> None:
    with Ticker(family_program) as parent, Ticker(ticker_program) as stranger:
        expected = [str(ticker_program)]
        with Recorder(daemon.target, TICK, pids=[parent.pid], follow=True, expected_files=expected) as recorder:
            parent.do(f"exec {ticker_program} 1")
            stranger.do("fire 5")
            parent.do(f"exec {ticker_program} 1")
    account = recorder.finish()
    assert account.delivered == 2
    assert {event.pid for event in recorder.events}.isdisjoint({stranger.pid})
    # both engines arm files then, not processes
    assert account.filtered == 5


_PARENT = """
import subprocess, sys
print("ready")
sys.stdin.readline()
child = subprocess.Popen([sys.argv[1]], stdin=open(sys.argv[2]), stdout=subprocess.DEVNULL)
print("child", child.pid)
sys.stdin.readline()
"""


def test_scope_lasts_as_long_as_any_of_its_processes(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    os.mkfifo(commands)
    with (
        open(os.open(commands, os.O_RDWR), "w", encoding="utf-8", buffering=1) as writing,
        Ticker(SYSTEM_PYTHON, "-u", "-c", _PARENT, ticker_program, commands) as parent,
        Recorder(daemon.target, TICK, pids=[parent.pid], follow=True) as recorder,
    ):
        child = parent.do("begin")
        wait_for(recorder.armed, "the child's program to be armed")
        parent.kill()
        writing.write("fire 3\n")
        wait_for(lambda: len(recorder.events) == 3, "the child's events")
        assert {event.pid for event in recorder.events} == {child}
        assert recorder.end_reason is None
        writing.write("quit\n")
        wait_for(lambda: recorder.end_reason, "the subscription to end with the last process")
    assert recorder.end_reason is EndReason.PROCESSES_ENDED


@pytest.mark.vm
def test_children_that_were_forked_before(daemon: Daemon, ticker_program: Path) -> None:
    # as of servers that fork before they accept
    shell = ("sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh")
    prefork = (*shell, *shell, ticker_program)
    with Ticker(*prefork) as master, Ticker(ticker_program) as stranger:
        with Recorder(daemon.target, TICK, pids=[master.pid], follow=True) as recorder:
            assert len(recorder.armed()) == 1
            master.do("fire 3")
            stranger.do("fire 2")
        account = recorder.finish()
        assert (account.delivered, account.lost) == (3, 0)
        (pid,) = {event.pid for event in recorder.events}
        assert pid not in {master.pid, stranger.pid}
        master.begin("quit")


@pytest.mark.parametrize("engine", ["bpf"])
def test_a_client_follows_so_many_times_at_once(own_daemon: Daemon) -> None:
    options = SubscribeOptions(pids=[os.getpid()], follow=True)
    with Client(own_daemon.target) as client:
        made = [client.subscribe(TICK, options) for _ in range(16)]
        with pytest.raises(LimitReachedError, match="follow processes 16 times, which is the limit"):
            client.subscribe(TICK, options)
        made.pop().unsubscribe()

        def subscribed() -> Subscription | None:
            try:
                return client.subscribe(TICK, options)
            except LimitReachedError:
                return None

        last = wait_for(subscribed, "the ended one's place")
        assert last is not None
        assert tracepoints(own_daemon.pid) == ["sched_process_exit", "task_newtask"]
        for subscription in [*made, last]:
            subscription.unsubscribe()
    wait_for(lambda: not tracepoints(own_daemon.pid), "forks to be nobody's business again")


def tracepoints(pid: int) -> list[str]:
    """Answer where programs of a process are attached."""
    found = []
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            found += re.findall(r"^tp_name:\s*(\w+)", path.read_text(), re.MULTILINE)
    return sorted(found)


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


@pytest.mark.parametrize("engine", ["bpf"])
def test_user_follows_own_processes_alone(engine: str, ticker_program: Path, folder: Path) -> None:
    """A set-user-ID program that a user's process executes is another user's, and so is what it executes."""
    own, privileged = folder / "own", folder / "privileged"
    for path in own, privileged:
        shutil.copy(ticker_program, path)
    os.chown(privileged, BERT.uid, BERT.uid)
    privileged.chmod(0o4755)
    script = f"echo ready; while read line; do {privileged} 5; {own} 3; echo done 0; done"
    with (
        running_daemon(folder, "--engine", engine) as daemon,
        Ticker(*ANNE.command("sh", "-c", script)) as shell,
    ):
        os.chmod(daemon.target.removeprefix("unix:"), 0o666)
        with ANNE.connecting(daemon.target) as target:
            files = [str(own), str(privileged)]
            with Recorder(target, TICK, pids=[shell.pid], follow=True, expected_files=files) as recorder:
                shell.do("go")
            account = recorder.finish()
    assert Counter(event.probe.path for event in recorder.events) == {str(own): 3}
    assert (account.fired, account.delivered) == (3, 3)


@pytest.mark.parametrize("engine", ["bpf"])
def test_children_are_unpatched_when_the_daemon_is_killed(own_daemon: Daemon, family_program: Path) -> None:
    with Ticker(family_program) as parent, Client(own_daemon.target) as client:
        client.subscribe(TICK, SubscribeOptions(pids=[parent.pid], follow=True))
        child = parent.do("stay")
        probes = client.list_probes(f"{TICKER}:tick", pids=[parent.pid, child]).probes
        assert set(semaphores(child, probes).values()) >= {1}
        own_daemon.kill()
        wait_for(lambda: not any(semaphores(child, probes).values()), "the child's semaphore to fall")
        assert parent.semaphore == 0
        assert parent.do("fork 5") == 0
    own_daemon.restart()
