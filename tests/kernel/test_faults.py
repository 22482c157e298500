"""What the kernel, the disk or an operator takes away, and daemons and programs that are killed at the worst moment.

Where a fault cannot be had otherwise, strace makes the kernel refuse a system call of the daemon's, or kills it in one.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.client import (
    Client,
    ClientError,
    EventBatch,
    RequestFailedError,
    SiteState,
    SubscribeOptions,
    Subscription,
)
from stapsdtd.kernel import procfs
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import (
    COMMANDS,
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    compile_target,
    descriptors,
    injected,
    is_dead,
    mapped_bytes,
    running_daemon,
    semaphores,
    wait_for,
)

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

_TRACING = "/sys/kernel/tracing"
_NOP = b"\x90"
_MOST_STEPS = 12


def selector(program: Path | str, name: str) -> str:
    return f"{TICKER}:{program}::{name}"


def own(tracefs: Tracefs, pid: int) -> list[str]:
    """A daemon's definitions and instances."""
    names = [f"{group}/{event}" for group, event in tracefs.uprobe_events()] + tracefs.instances()
    return [name for name in names if f"_{pid}_" in name]


def is_traced(daemon: Daemon, ticker: Ticker, program: Path) -> None:
    """A daemon serves as if nothing had been, and lets go of what it armed."""
    with Recorder(daemon.target, selector(program, "tick(arg0)")) as recorder:
        assert [status.state for status in recorder.sites] == [SiteState.ARMED]
        assert ticker.do("fire 3") == 1
    assert recorder.values() == [(0,), (1,), (2,)]
    assert recorder.finish().lost == 0
    assert ticker.semaphore == 0


def is_unpatched(daemon: Daemon, ticker: Ticker, program: Path) -> None:
    """No breakpoint and no semaphore is left in a process."""
    with Client(daemon.target) as client:
        probes = client.list_probes(selector(program, "*")).probes
    assert len(probes) == 3
    for probe in probes:
        for site in probe.sites:
            assert mapped_bytes(ticker.pid, probe.path, site.offset, 1, "x") == _NOP
    assert not any(semaphores(ticker.pid, probes).values())


@contextmanager
def troubled_daemon(folder: Path, *options: str, prefix: tuple[str, ...] = ()) -> Iterator[Daemon]:
    """One that may say that it is in trouble, in single lines, and ends well."""
    daemon = Daemon(folder, *options, prefix=prefix)
    try:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log(), daemon.log()
    finally:
        with suppress(ProcessLookupError):
            daemon.process.kill()
        daemon.process.wait()


def refused(sites: Subscription) -> set[str]:
    """Why its sites are refused, all of them."""
    assert {status.state for status in sites.sites} == {SiteState.REFUSED}
    return {status.reason for status in sites.sites}


# killed


@pytest.fixture
def foreign(tracefs: Tracefs, ticker_program: Path) -> Iterator[None]:
    """Another tool's event and instance, of the very same file and in use."""
    group = f"bystander_{os.getpid()}"
    tracefs.append_definition(f"p:{group}/event {ticker_program}:0x1100")
    tracefs.make_instance(group)
    tracefs.write(f"instances/{group}/events/{group}/event/enable", "1")
    yield
    assert tracefs.events(group) == ["event"]
    assert tracefs.read(f"instances/{group}/events/{group}/event/enable") == "1\n"
    tracefs.write(f"instances/{group}/events/{group}/event/enable", "0")
    tracefs.remove_instance(group)
    tracefs.append_definition(f"-:{group}/event")


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


def subscribe_and_unsubscribe(daemon: Daemon, program: Path) -> None:
    with Client(daemon.target, timeout_seconds=10) as client, suppress(ClientError):
        client.subscribe(selector(program, "*")).unsubscribe()


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("bpf", "definitions"),
        ("bpf", "perf_event_open"),
        ("bpf", "bpf"),
        ("ftrace", "definitions"),
        ("ftrace", "switches"),
        ("ftrace", "mkdir"),
        ("ftrace", "rmdir"),
    ],
    indirect=["engine"],
)
def test_killed_in_any_step_of_arming_and_disarming(
    own_daemon: Daemon, kind: str, ticker: Ticker, ticker_program: Path, tracefs: Tracefs
) -> None:
    """The first call of a kind kills it, after a restart the second one, and so on, until none is left that could."""
    for number in range(1, _MOST_STEPS):
        files = files_of(own_daemon, kind)
        with injected(own_daemon.pid, "write" if files else kind, f"signal=KILL:when={number}", *files):
            subscribe_and_unsubscribe(own_daemon, ticker_program)
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


# tracefs


def in_its_namespace(daemon: Daemon, *command: str) -> None:
    subprocess.run(["nsenter", "-t", str(daemon.pid), "-m", *command], check=True)


@pytest.mark.parametrize(
    ("take", "give", "reason"),
    [
        (("umount", "-l", _TRACING), ("mount", "-t", "tracefs", "nodev", _TRACING), "No such file or directory"),
        (
            ("mount", "-o", "remount,bind,ro", _TRACING),
            ("mount", "-o", "remount,bind,rw", _TRACING),
            "Read-only file system",
        ),
    ],
    ids=["unmounted", "read-only"],
)
def test_tracefs_is_taken_away_and_given_back(
    *,
    tmp_path: Path,
    engine: str,
    ticker: Ticker,
    ticker_program: Path,
    tracefs: Tracefs,
    take: tuple[str, ...],
    give: tuple[str, ...],
    reason: str,
) -> None:
    with (
        troubled_daemon(tmp_path, "--engine", engine, prefix=("unshare", "-m")) as daemon,
        Client(daemon.target) as client,
    ):
        with Recorder(daemon.target, selector(ticker_program, "tick(arg0)")) as recorder:
            ticker.do("fire 2")
            in_its_namespace(daemon, *take)
            ticker.do("fire 3")
            wait_for(lambda: len(recorder.events) == 5, "the events of what was armed before")
            if engine == "bpf":
                subscription = client.subscribe(selector(ticker_program, "values"))
                assert all(reason in found for found in refused(subscription))
                subscription.unsubscribe()
            else:
                with pytest.raises(RequestFailedError, match=reason):
                    client.subscribe(selector(ticker_program, "values"))
            wait_for(lambda: daemon.log().count(" ERROR ") == 1, "the daemon to say that it cannot serve")
            assert "NOT_SERVING" in daemon.log()
        assert recorder.values() == [(0,), (1,), (0,), (1,), (2,)]
        assert recorder.finish().fired == 5
        in_its_namespace(daemon, *give)
        wait_for(lambda: ticker.semaphore == 0, "what could not be disarmed to be disarmed")
        wait_for(lambda: " SERVING" in daemon.log(), "the daemon to say that it serves")
        is_traced(daemon, ticker, ticker_program)
        wait_for(lambda: own(tracefs, daemon.pid) == [], "what could not be removed to be removed")
        is_unpatched(daemon, ticker, ticker_program)


def start(folder: Path, *options: str, prefix: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A daemon that does not come to serve."""
    return subprocess.run(
        [*prefix, COMMANDS / "stapsdtd", "--listen", f"unix:{folder}/socket", "--log-level", "error", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def after(script: str) -> tuple[str, ...]:
    """A command that runs another one in a mount namespace where a script ran before."""
    return ("unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh")


WITHOUT_BPF = ("setpriv", "--bounding-set=-bpf,-sys_admin", "--inh-caps=-bpf,-sys_admin")


@pytest.mark.parametrize(
    ("prefix", "options", "said"),
    [
        (after(f"umount {_TRACING}"), (), "mount -t tracefs"),
        (after(f"mount -o remount,bind,ro {_TRACING}"), (), "is not writable"),
        (WITHOUT_BPF, ("--engine", "bpf"), "run as root or with CAP_BPF"),
        (("prlimit", "--nofile=16"), (), "LimitNOFILE"),
        (("prlimit", "--nofile=60"), (), "LimitNOFILE"),
        (after("mount -t tmpfs -o nr_inodes=1 none /mnt"), ("--listen", "unix:/mnt/socket"), "No space left on device"),
    ],
    ids=["tracefs unmounted", "tracefs read-only", "no bpf", "16 descriptors", "60 descriptors", "disk full"],
)
def test_start_says_in_one_line_what_it_lacks(
    tmp_path: Path, prefix: tuple[str, ...], options: tuple[str, ...], said: str
) -> None:
    ended = start(tmp_path, *options, prefix=prefix)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert said in ended.stderr


def test_without_bpf_the_other_engine_serves(tmp_path: Path, ticker: Ticker, ticker_program: Path) -> None:
    with running_daemon(tmp_path, prefix=WITHOUT_BPF) as daemon:
        with Client(daemon.target) as client:
            assert client.info().engine == "ftrace"
        assert daemon.log().count("the ftrace engine is used instead") == 1
        is_traced(daemon, ticker, ticker_program)


# refusals


@pytest.mark.parametrize(
    ("calls", "error", "paths", "words"),
    [
        ("perf_event_open", "EACCES", (), "Permission denied"),
        ("bpf", "EPERM", (), "Operation not permitted"),
        # what the kernel says when it has no event number left: there are 65,535 for all of tracefs
        ("write", "ENODEV", (f"{_TRACING}/uprobe_events",), "No such device"),
        ("write", "ENOMEM", (f"{_TRACING}/uprobe_events",), "Cannot allocate memory"),
        ("write", "ENOSPC", (f"{_TRACING}/uprobe_events",), "No space left on device"),
    ],
    ids=["perf", "bpf", "events", "memory", "space"],
)
@pytest.mark.usefixtures("foreign")
def test_kernel_refuses_for_a_while(
    *,
    tmp_path: Path,
    engine: str,
    ticker: Ticker,
    ticker_program: Path,
    tracefs: Tracefs,
    calls: str,
    error: str,
    paths: tuple[str, ...],
    words: str,
) -> None:
    """What is armed goes on, what is new is refused with the kernel's words, and all is well when it is over."""
    with (
        troubled_daemon(tmp_path, "--engine", engine) as daemon,
        Client(daemon.target) as client,
        Recorder(daemon.target, selector(ticker_program, "tick(arg0)")) as recorder,
    ):
        ticker.do("fire 2")
        with injected(daemon.pid, calls, f"error={error}", *paths):
            subscription = client.subscribe(selector(ticker_program, "values"))
            if engine == "ftrace" and not paths:
                # which needs neither
                assert [status.state for status in subscription.sites] == [SiteState.ARMED]
            else:
                assert all(words in reason for reason in refused(subscription))
            ticker.do("fire 2")
            subscription.unsubscribe()
        with Recorder(daemon.target, selector(ticker_program, "values(arg8)")) as later:
            ticker.do("values")
        assert later.values() == [(77,)]
        account = recorder.finish()
        assert recorder.values() == [(0,), (1,)] * 2
        assert (account.fired, account.delivered) == (4, 4)
        wait_for(lambda: own(tracefs, daemon.pid) == [], "all to be disarmed")
        is_unpatched(daemon, ticker, ticker_program)


def test_disk_is_full(tmp_path: Path, engine: str, ticker: Ticker, ticker_program: Path) -> None:
    """The disk of its log, its socket and its temporary files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=True)
    try:
        daemon = Daemon(disk, "--engine", engine, prefix=("env", f"TMPDIR={disk}"))
        try:
            with open(disk / "filler", "wb", buffering=0) as filler, suppress(OSError):
                while True:
                    filler.write(b"x")
            with Recorder(daemon.target, selector(ticker_program, "tick(arg0)"), kernel_buffer_kib=16384) as recorder:
                ticker.do("fire 50000")
            assert [value for (value,) in recorder.values()] == list(range(50_000))
            assert recorder.finish().fired == 50_000
            (disk / "filler").unlink()
            is_traced(daemon, ticker, ticker_program)
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log()
        finally:
            daemon.process.kill()
            daemon.process.wait()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_descriptors_run_out(
    tmp_path: Path, engine: str, ticker: Ticker, ticker_program: Path, tracefs: Tracefs
) -> None:
    """What can be armed is, the rest is refused, others are served, and later everything can be armed."""
    count, spare = 12, 12
    copies = [Path(shutil.copy(ticker_program, tmp_path / f"copy{number}")) for number in range(count)]
    folder = tmp_path / "daemon"
    folder.mkdir()
    with ExitStack() as stack, troubled_daemon(folder, "--engine", engine) as daemon:
        tickers = [stack.enter_context(Ticker(copy)) for copy in copies]
        client = stack.enter_context(Client(daemon.target))
        wanted = selector(f"{tmp_path}/copy*", "tick(arg0)")
        wait_for(lambda: len(client.list_probes(wanted)) == count, "the copies to be known")
        # the first subscription makes buffers that stay
        is_traced(daemon, ticker, ticker_program)
        before = descriptors(daemon.pid)
        _, most = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (before + spare, most))
        subscription = client.subscribe(wanted)
        states = [status.state for status in subscription.sites]
        assert len(states) == count
        if engine == "bpf":
            assert 0 < states.count(SiteState.ARMED) < count
        reasons = {status.reason for status in subscription.sites if status.state is SiteState.REFUSED}
        assert all("Too many open files" in reason for reason in reasons)
        subscription.unsubscribe()
        wait_for(lambda: own(tracefs, daemon.pid) == [], "all to be disarmed")
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (most, most))
        with Recorder(daemon.target, wanted) as recorder:
            assert [each.do("fire 2") for each in tickers] == [1] * count
        assert len(recorder.armed()) == count
        assert recorder.finish().fired == recorder.finish().delivered == 2 * count
        wait_for(lambda: descriptors(daemon.pid) <= before, "the descriptors to be as before")
        is_traced(daemon, ticker, ticker_program)


@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_no_memory_for_a_buffer(own_daemon: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    """The one that wants it is refused with that reason; others have theirs."""
    limits = resource.prlimit(own_daemon.pid, resource.RLIMIT_AS)
    with (
        Recorder(own_daemon.target, selector(ticker_program, "tick(arg0)")) as recorder,
        Client(own_daemon.target) as client,
    ):
        pages = int(Path(f"/proc/{own_daemon.pid}/statm").read_text().split()[0])
        resource.prlimit(own_daemon.pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), limits[1]))
        ticker.do("fire 2")
        greedy = client.subscribe(selector(ticker_program, "values"), SubscribeOptions(kernel_buffer_kib=65536))
        assert all("Cannot allocate memory" in reason for reason in refused(greedy))
        ticker.do("fire 2")
        greedy.unsubscribe()
        resource.prlimit(own_daemon.pid, resource.RLIMIT_AS, limits)
        with Recorder(own_daemon.target, selector(ticker_program, "values(arg8)"), kernel_buffer_kib=65536) as later:
            ticker.do("values")
        assert later.values() == [(77,)]
    assert recorder.values() == [(0,), (1,)] * 2


# programs


@pytest.fixture(scope="session")
def changing_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    return compile_target("churning.c", folder / "changing", "-DPROVIDER=changing", "-ldl", "-lpthread")


def changing(program: Path, name: str = "beat(arg0, arg1)") -> str:
    return f"changing:{program}::{name}"


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
            assert mapped_bytes(child, probe.path, probe.sites[0].offset, 1, "x") == _NOP
        assert parent.do("semaphores") == 0


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


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
