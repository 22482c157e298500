"""What the kernel, the disk or an operator takes away.

Where a fault cannot be had otherwise, strace makes the kernel refuse a system call of the daemon's.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from stapsdtd.client import (
    Client,
    RequestFailedError,
    SiteState,
    SubscribeOptions,
    Subscription,
)
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.kernel.recovery import bystander, is_traced, is_unpatched, selector
from tests.support import (
    COMMANDS,
    Daemon,
    Recorder,
    Ticker,
    descriptors,
    injected,
    running_daemon,
    wait_for,
)

pytestmark = pytest.mark.kernel

_TRACING = "/sys/kernel/tracing"


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


@pytest.fixture
def foreign(tracefs: Tracefs, ticker_program: Path) -> Iterator[None]:
    with bystander(tracefs, ticker_program):
        yield


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
        with Recorder(daemon.target, selector(ticker_program, "tick(arg0)"), pids=[ticker.pid]) as recorder:
            ticker.do("fire 2")
            in_its_namespace(daemon, *take)
            ticker.do("fire 3")
            wait_for(lambda: len(recorder.events) == 5, "the events of what was armed before")
            if engine == "bpf":
                # what is for all processes needs no tracefs
                subscription = client.subscribe(selector(ticker_program, "values"), SubscribeOptions(pids=[ticker.pid]))
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


_TOLD = re.compile(r"(bpf\(BPF_\w+\) .+|uprobe_events: the kernel refused '.+'): [^;]+; .*'.+'|perf_event_open")


@pytest.mark.parametrize(
    ("calls", "error", "paths", "words", "is_scoped"),
    [
        ("perf_event_open", "EACCES", (), "Permission denied", True),
        ("bpf", "EPERM", (), "Operation not permitted", True),
        ("bpf", "EPERM", (), "Operation not permitted", False),
        # what the kernel says when it has no event number left: there are 65,535 for all of tracefs
        ("write", "ENODEV", (f"{_TRACING}/uprobe_events",), "No such device", True),
        ("write", "ENOMEM", (f"{_TRACING}/uprobe_events",), "Cannot allocate memory", True),
        ("write", "ENOSPC", (f"{_TRACING}/uprobe_events",), "No space left on device", True),
    ],
    ids=["perf", "bpf", "links", "events", "memory", "space"],
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
    is_scoped: bool,
) -> None:
    """What is armed goes on, what is new is refused with the kernel's words, and all is well when it is over."""
    with (
        troubled_daemon(tmp_path, "--engine", engine) as daemon,
        Client(daemon.target) as client,
        Recorder(daemon.target, selector(ticker_program, "tick(arg0)")) as recorder,
    ):
        ticker.do("fire 2")
        with injected(daemon.pid, calls, f"error={error}", *paths):
            options = SubscribeOptions(pids=[ticker.pid] if is_scoped else [])
            subscription = client.subscribe(selector(ticker_program, "values"), options)
            if engine == "ftrace" and not paths:
                # which needs neither
                assert [status.state for status in subscription.sites] == [SiteState.ARMED]
            else:
                reasons = refused(subscription)
                assert all(words in reason for reason in reasons)
                # of what, and what to do
                assert all(_TOLD.search(reason) for reason in reasons), reasons
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


@pytest.mark.alone  # what others start and map takes the daemon descriptors, too
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
