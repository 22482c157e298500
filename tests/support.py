"""What tests of all rings share: waiting, real target programs, a real daemon."""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

import pytest

from stapsdtd.cli.stapsdt import run as run_stapsdt
from stapsdtd.client import (
    Account,
    Client,
    Encoding,
    End,
    EndReason,
    Event,
    EventBatch,
    LimitReachedError,
    Loss,
    NotFoundError,
    Probe,
    ServerUnavailableError,
    SiteState,
    SiteStatus,
    Status,
    SubscribeOptions,
    Value,
)
from stapsdtd.kernel import procfs
from tests.semaphores import mapped_bytes as mapped_bytes
from tests.semaphores import semaphores as semaphores
from tests.waiting import TIME_FACTOR as TIME_FACTOR
from tests.waiting import require as require
from tests.waiting import wait_for as wait_for

ROOT = Path(__file__).parent.parent
COMMANDS = Path(sys.executable).parent
TARGETS = ROOT / "tests" / "targets"
SYSTEM_PYTHON = os.path.realpath("/usr/bin/python3")
"""The distribution's, whose interpreter has probes: 3.11 on Debian 12, 3.13 on 13."""
TICKER = "ticker" if "STAPSDTD_TARGETS" in os.environ else f"p{os.getpid()}ticker"
"""The provider of tests/targets/ticker.c. The name is this process's own: tests in others must not trace it."""
PYPROGRAM = f"p{os.getpid()}program"
"""That of tests/targets/provider_program.py."""


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a temporary folder of the run, the same in each of pytest-xdist's processes."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def compile_target(source: str, output: Path, *flags: str) -> Path:
    """Compile tests/targets/SOURCE, or take what was compiled elsewhere for a machine without a compiler."""
    if folder := os.environ.get("STAPSDTD_TARGETS"):
        return Path(shutil.copy(Path(folder) / output.name, output))
    return compile_once(TARGETS / source, output, ["gcc", "-O2", "-g"], flags)


def compile_once(
    source: Path, output: Path, compiler: Sequence[str], flags: Sequence[str] = (), *, headers: Path | None = None
) -> Path:
    """Compile a program, or copy what a test of this run compiled of the same source with the same flags.

    flags: what has to stand behind the source, such as libraries. headers: where further ones are, the same in each
    call. Each output is a file of its own, with its own inode.
    """

    def compile_to(path: Path) -> None:
        include = [f"-I{headers}"] if headers else []
        subprocess.run([*compiler, *include, "-o", str(path), str(source), *flags], check=True)

    folder = os.environ.get("STAPSDTD_COMPILED")
    if folder is None:
        compile_to(output)
        return output
    key = hashlib.sha256(repr((source.read_bytes(), compiler, flags)).encode()).hexdigest()
    kept = Path(folder) / key
    if not kept.exists():
        # several processes may do so at once, and any one's is right
        own = kept.with_name(f"{key}.{os.getpid()}")
        compile_to(own)
        own.rename(kept)
    return Path(shutil.copy(kept, output))


class Ticker:
    """A running tests/targets/ticker.c, or another program that speaks as it does."""

    def __init__(self, *command: Path | str) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def begin(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def finish(self) -> int:
        """Wait for a command that was begun; answer the semaphore's value then."""
        answer = self._read()
        assert answer, f"ticker died: {self._process.poll()}"
        return int(answer.rsplit(" ", 1)[1])

    def do(self, command: str) -> int:
        self.begin(command)
        return self.finish()

    @property
    def semaphore(self) -> int:
        return self.do("semaphore")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Daemon:
    """A real stapsdtd, in a process of its own, on a socket in a temporary folder.

    It knows installed files only if has_inventory: most tests are of what is armed because a process maps it.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        prefix: Sequence[str] = (),
        commands: Path = COMMANDS,
        has_inventory: bool = False,
    ) -> None:
        self.target = f"unix:{folder / 'daemon.sock'}"
        self.log_path = folder / "daemon.log"
        if not has_inventory and _may_have_inventory(commands):
            options = ("--no-inventory", *options)
        self._command = [*prefix, str(commands / "stapsdtd"), "--listen", self.target, *options]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.log_path, "ab") as log:
            process = subprocess.Popen(self._command, stderr=log)
        path = self.target.removeprefix("unix:")

        def is_ready() -> bool:
            if process.poll() is not None:
                pytest.fail(f"the daemon ended with {process.returncode}:\n{self.log()}")
            _, started, own_log = self.log().rpartition(f"stapsdtd {process.pid} starts")
            return bool(started) and f"serving on {self.target}" in own_log and os.path.exists(path)

        try:
            # a host that is busy may take long, which is not what tests are about
            wait_for(is_ready, "the daemon to serve", seconds=60)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """As the kernel would when memory runs out."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()

    def stop(self) -> int:
        """SIGTERM; answer the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=30 * TIME_FACTOR)


def _may_have_inventory(commands: Path) -> bool:
    """Those of an earlier revision may have none."""
    if commands == COMMANDS:
        return True
    said = subprocess.run([commands / "stapsdtd", "--help"], capture_output=True, text=True, check=True).stdout
    return "--no-inventory" in said


def is_failure(line: str) -> bool:
    """Report whether a daemon's line of its log is of an error that it should not have."""
    # a program takes an emulated processor seconds to verify, and an arming several of them
    is_slow = TIME_FACTOR > 1 and "the arming thread has been busy or hanging" in line
    return " ERROR " in line and not is_slow


@contextmanager
def running_daemon(
    folder: Path,
    *options: str,
    prefix: Sequence[str] = (),
    commands: Path = COMMANDS,
    has_inventory: bool = False,
) -> Iterator[Daemon]:
    """A daemon that must end cleanly, without a traceback in its log.

    prefix is a command that runs it; commands, where it is installed.
    """
    daemon = Daemon(folder, *options, prefix=prefix, commands=commands, has_inventory=has_inventory)
    try:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log(), daemon.log()
        assert not [line for line in daemon.log().splitlines() if is_failure(line)], daemon.log()
    finally:
        with suppress(ProcessLookupError):
            daemon.process.kill()
        daemon.process.wait()


def is_dead(pid: int) -> bool:
    stat = procfs.stat(pid)
    return stat is None or stat.state in "ZX"


@contextmanager
def injected(pid: int, calls: str, what: str, *paths: str) -> Iterator[subprocess.Popen[str]]:
    """Have system calls of a process's end as strace is told, as long as it is there; those on the paths, if any."""
    require(shutil.which("strace"), "strace")
    command = ["strace", "-f", "-o", "/dev/null", "-p", str(pid), "-e", f"trace={calls}"]
    command += [part for path in paths for part in ("-P", path)] + ["-e", f"inject={calls}:{what}"]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    try:
        line = next(line for line in strace.stderr if "Requested path" not in line)
        assert "attached" in line, line
        yield strace
    finally:
        # of a daemon that it killed it may wait for threads that are no more, and so let nobody else have it
        strace.send_signal(signal.SIGKILL if is_dead(pid) else signal.SIGINT)
        try:
            strace.communicate(timeout=5 * TIME_FACTOR)
        except subprocess.TimeoutExpired:
            # it was killed in between
            strace.kill()
            strace.communicate()


def stapsdt(target: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the client's command against a daemon.

    With emulated instructions, an interpreter takes ten seconds to begin. There the command runs in this one, but those
    that fork.
    """
    command = stapsdt_command(target, *arguments)
    if TIME_FACTOR > 1 and {"-c", "--"}.isdisjoint(arguments):
        return _run_here(command, check=check)
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=60 * TIME_FACTOR)


def _run_here(command: Sequence[str], *, check: bool) -> subprocess.CompletedProcess[str]:
    with TemporaryFile("w+", encoding="utf-8") as output, TemporaryFile("w+", encoding="utf-8") as errors:
        with redirect_stdout(output), redirect_stderr(errors):
            status = run_stapsdt([*command[1:]])
        for written in (output, errors):
            written.seek(0)
        done = subprocess.CompletedProcess(command, status, output.read(), errors.read())
    if check:
        done.check_returncode()
    return done


def stapsdt_command(target: str, *arguments: str) -> Sequence[str]:
    return [str(COMMANDS / "stapsdt"), "--server", target, *arguments]


class Recorder:
    """Subscribes, and keeps every event it is given; leaving the `with` unsubscribes and waits for the last of them."""

    def __init__(
        self,
        target: str,
        *selectors: str,
        pids: Sequence[int] = (),
        uids: Sequence[int] = (),
        execnames: Sequence[str] = (),
        cgroups: Sequence[str] = (),
        containers: Sequence[str] = (),
        include_clients: bool = False,
        where: str = "",
        kernel_buffer_kib: int = 0,
        queue_bytes: int = 0,
        files: Sequence[str] = (),
        fields: Sequence[str] = (),
        expected_files: Sequence[str] = (),
        follow: bool = False,
    ) -> None:
        self._client = Client(target)
        self._subscription = self._client.subscribe(
            list(selectors),
            SubscribeOptions(
                pids=pids,
                exclude_pids=[os.getpid()],
                uids=uids,
                execnames=execnames,
                cgroups=cgroups,
                containers=containers,
                include_clients=include_clients,
                where=where,
                kernel_buffer_kib=kernel_buffer_kib,
                queue_bytes=queue_bytes,
                files=files,
                fields=fields,
                expected_files=expected_files,
                follow=follow,
            ),
        )
        self.sites = self._subscription.sites
        self.events: list[Event] = []
        self.losses: list[Loss] = []
        self.statuses: list[SiteStatus] = list(self.sites)
        self.account: Account | None = None
        self.end_reason: EndReason | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        # else whoever goes on at once may end the subscription before
        wait_for(self._is_streaming, "the stream to begin")

    def _is_streaming(self) -> bool:
        try:
            own = [each for each in self._client.subscriptions() if each.id == self._subscription.id]
        except LimitReachedError:
            # a role may allow fewer requests than are made here
            return False
        return not self._thread.is_alive() or any(each.streaming for each in own)

    def _read(self) -> None:
        for message in self._subscription.messages(encoding=Encoding.ROWS):
            match message:
                case EventBatch(events=events):
                    self.events += events
                case Loss():
                    self.losses.append(message)
                case Status(sites=sites):
                    self.statuses += sites
                case End(account=account, reason=reason):
                    self.account = account
                    self.end_reason = reason
                case _:
                    pass

    def armed(self) -> list[SiteStatus]:
        """Every site that was armed since the beginning."""
        return [status for status in self.statuses if status.state is SiteState.ARMED]

    def values(self) -> list[tuple[Value, ...]]:
        return [event.values for event in self.events]

    def finish(self) -> Account:
        if self._thread.is_alive():
            # the End may be on its way
            with suppress(NotFoundError, ServerUnavailableError):
                self._subscription.unsubscribe()
        self._thread.join(timeout=30 * TIME_FACTOR)
        self._client.close()
        assert self.account is not None
        return self.account

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


@contextmanager
def held_port() -> Iterator[int]:
    """Of loopback, which nobody else is given meanwhile: it is bound, but whoever is told of it may listen there."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        yield port


def descriptors(pid: int) -> int:
    """How many are open. What earlier tests left to the garbage collector does not count."""
    if pid == os.getpid():
        gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int | None = None) -> set[int]:
    """Ids of the processes that this one, or another, started and has not waited for: zombies too."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid or 'self'}/task").glob("*/children"):
        # a thread may end meanwhile
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, path.read_text().split()))
    return found


def resident_kib(pid: int) -> int:
    return status_kib(pid, "VmRSS")


def status_kib(pid: int, name: str) -> int:
    """A size in /proc/PID/status."""
    return int(Path(f"/proc/{pid}/status").read_text().split(f"\n{name}:")[1].split()[0])


def armed_semaphores(probes: Iterable[Probe]) -> Counter[int]:
    """What `semaphores` answers while one event holds each site: sites may share a semaphore."""
    sites = (site for probe in probes for site in probe.sites)
    return Counter(site.semaphore_offset for site in sites if site.semaphore_offset is not None)


def notes_in(path: str) -> int:
    """How many stapsdt notes binutils finds in a file."""
    notes = subprocess.run(["readelf", "-nW", path], capture_output=True, text=True, check=True).stdout
    return notes.count("NT_STAPSDT")


@contextmanager
def without_descriptors() -> Iterator[None]:
    """Let this process open nothing."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
