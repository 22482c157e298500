"""The units of systemd/, run by a systemd: the sandbox it makes, the socket it passes on, and what it does when the
daemon hangs or is killed.

systemd runs as a user's manager, of root, since the first process of this host is another. Everything it could touch is
private to it: the mounts, /run, and of the cgroups a new one with nobody else in it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stapsdtd.client import Client
from stapsdtd.kernel.mounts import mounts
from stapsdtd.kernel.perf import ALL_PROCESSES, online_cpus
from stapsdtd.kernel.perf_opener import SOCKET_PATH, Kind, PerfOpener
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import COMMANDS, TICKER, Recorder, Ticker, injected, require, stapsdt, stapsdt_command, wait_for
from tests.units import OPENER_SERVICE, OPENER_SOCKET, SERVICE, SOCKET, UNITS, settings

pytestmark = [pytest.mark.kernel, pytest.mark.apart]

_SYSTEMD = "/lib/systemd/systemd"
_BEGIN = """
set -e
echo $$ > "$CGROUP/cgroup.procs"
exec unshare --mount --cgroup sh -ec '
    mount -t tmpfs none /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup
    mount -t tmpfs none /run
    # what the first systemd of a host makes, and sandboxes are made with
    mkdir -p /run/systemd/system /run/systemd/inaccessible/dir /run/stapsdtd
    : > /run/systemd/inaccessible/reg
    mknod /run/systemd/inaccessible/chr c 0 0
    mkdir -m 0700 /run/manager
    export XDG_RUNTIME_DIR=/run/manager
    exec "$SYSTEMD" --user --unit=basic.target
'
"""


class Manager:
    """A systemd of our own."""

    def __init__(self, folder: Path, cgroup: Path) -> None:
        self.log_path = folder / "daemon.log"
        # it has no journal
        output = f"[Service]\nStandardOutput=append:{self.log_path}\nStandardError=append:{self.log_path}\n"
        units = folder / "systemd" / "user"
        (units / "stapsdtd.service.d").mkdir(parents=True)
        (units / "stapsdtd.service.d" / "log.conf").write_text(output)
        for unit in (SERVICE, SOCKET, OPENER_SERVICE, OPENER_SOCKET):
            text = unit.read_text().replace("/opt/stapsdtd/bin", str(COMMANDS))
            (units / unit.name).write_text(text.replace("/etc/stapsdtd/stapsdtd.toml", str(UNITS / "stapsdtd.toml")))
        self._units = units
        variables = {"CGROUP": str(cgroup), "SYSTEMD": _SYSTEMD, "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
        self._process = subprocess.Popen(
            ["sh", "-c", _BEGIN],
            env={"PATH": os.environ["PATH"], **variables},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.root = f"/proc/{self._process.pid}/root"
        self.target = f"unix:{self.root}{settings(SOCKET, 'ListenStream')[0]}"
        wait_for(self._is_up, "systemd to run")

    def _is_up(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail(f"systemd ended with {self._process.returncode}")
        return self.do("is-system-running", check=False) in {"running", "degraded"}

    def do(self, *arguments: str, check: bool = True) -> str:
        """Run systemctl; answer what it prints."""
        command = ["nsenter", "--mount", f"--target={self._process.pid}", "systemctl", "--user", *arguments]
        done = subprocess.run(
            command,
            env={"PATH": os.environ["PATH"], "XDG_RUNTIME_DIR": "/run/manager"},
            capture_output=True,
            text=True,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"{done.stderr}\n{self.log()}"
        return done.stdout.strip()

    def set(self, assignment: str, unit: str = "stapsdtd.service", section: str = "Service") -> None:
        folder = self._units / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "more.conf").write_text(f"[{section}]\n{assignment}\n")
        self.do("daemon-reload")

    def show(self, name: str, unit: str = "stapsdtd.service") -> str:
        return self.do("show", "--value", f"--property={name}", unit)

    def pid(self) -> int:
        return int(self.show("MainPID"))

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def close(self) -> None:
        openers = ("stapsdtd-opener.socket", "stapsdtd-opener@*.service")
        self.do("stop", "stapsdtd.service", "stapsdtd.socket", *openers, check=False)
        self._process.terminate()
        try:
            self._process.communicate(timeout=20)
        finally:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    require(os.path.exists(_SYSTEMD) and shutil.which("systemctl"), "systemd")
    mount_points = [mount.point for mount in mounts() if mount.kind == b"cgroup2"]
    require(mount_points, "cgroup2")
    cgroup = Path(os.fsdecode(mount_points[0])) / f"stapsdtd-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        running = Manager(tmp_path, cgroup)
        try:
            yield running
        finally:
            running.close()
    finally:
        for folder, _, _ in os.walk(cgroup, topdown=False):
            with suppress(FileNotFoundError):
                wait_for(lambda: not Path(folder, "cgroup.procs").read_text(), "a cgroup to be empty")  # noqa: B023
            os.rmdir(folder)


def left_by(pid: int, tracefs: Tracefs) -> list[str]:
    names = [group for group, _ in tracefs.uprobe_events()] + tracefs.instances()
    return [name for name in names if f"_{pid}_" in name]


@pytest.mark.parametrize("engine", ["bpf", "ftrace"])
def test_a_client_starts_it_and_the_sandbox_lets_it_work(
    manager: Manager, engine: str, ticker: Ticker, ticker_program: Path, tracefs: Tracefs
) -> None:
    (command,) = re.findall("^ExecStart=(.*)", SERVICE.read_text(), re.MULTILINE)
    command = command.replace("/opt/stapsdtd/bin", str(COMMANDS))
    command = command.replace("/etc/stapsdtd/stapsdtd.toml", str(UNITS / "stapsdtd.toml"))
    manager.set(f"ExecStart=\nExecStart={command} --engine {engine}")
    manager.do("start", "stapsdtd.socket")
    assert manager.show("ActiveState") == "inactive"

    listed = stapsdt(manager.target, "list", f"{TICKER}:*", "--pid", str(ticker.pid), check=False)
    assert listed.returncode == 0, listed.stderr + manager.log()
    assert str(ticker.pid) in listed.stdout
    wait_for(lambda: manager.show("ActiveState") == "active", "the service to be up")
    status = Path(f"/proc/{manager.pid()}/status").read_text()
    assert "NoNewPrivs:\t1\n" in status
    assert "Seccomp:\t2\n" in status
    with Recorder(manager.target, f"{TICKER}:{ticker_program}::tick(arg0)") as recorder:
        with Ticker(ticker_program) as later:
            # from before its first instruction: the sandbox hides no folder that programs are in
            assert later.semaphore == 1
        assert ticker.do("fire 2") == 1
    assert recorder.values() == [(0,), (1,)]
    assert ticker.semaphore == 0
    manager.do("reload", "stapsdtd.service")
    wait_for(lambda: "stapsdtd.daemon: reloaded" in manager.log(), "the settings to be read again")
    wait_for(lambda: manager.show("ActiveState") == "active", "the service to say so")
    pid = manager.pid()
    manager.do("stop", "stapsdtd.service")
    assert not left_by(pid, tracefs)
    assert "unavailable on this host" not in manager.log(), manager.log()
    assert " ERROR " not in manager.log(), manager.log()


@pytest.mark.timeout(360)
def test_the_sandbox_lets_it_open_files(manager: Manager, tmp_path: Path, ticker_program: Path) -> None:
    manager.do("start", "stapsdtd.service")
    named = stapsdt(manager.target, "list", "--file", str(ticker_program), f"{TICKER}:tick", check=False)
    assert str(ticker_program) in named.stdout, named.stderr
    # it reads a whole /usr, at idle priority
    wait_for(lambda: "files with probes, looked at in" in manager.log(), "the scan", seconds=300)
    (state,) = wait_for(lambda: list(tmp_path.glob("**/stapsdtd/inventory")), "it to be kept")
    assert state.stat().st_mode & 0o777 == 0o600
    listed = stapsdt(manager.target, "list", "--installed", check=False)
    assert "/usr/" in listed.stdout, listed.stderr + manager.log()
    manager.do("restart", "stapsdtd.service")
    with Client(manager.target) as client:
        inventory = client.info().inventory
    assert inventory is not None
    assert inventory.files
    assert "cannot" not in manager.log(), manager.log()


def test_killed_it_is_cleaned_up_after_and_comes_back(manager: Manager, ticker: Ticker, tracefs: Tracefs) -> None:
    manager.set("RestartSec=0")
    manager.do("start", "stapsdtd.service")
    killed = manager.pid()
    command = stapsdt_command(manager.target, "trace", f"{TICKER}:tick")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        wait_for(lambda: ticker.semaphore == 1, "the probe to be armed")
        client.kill()
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: manager.pid() not in {0, killed}, "another one to be started")
    assert re.search("^removed [0-9]+ events and [0-9]+ instances$", manager.log(), re.MULTILINE)
    assert not left_by(killed, tracefs)
    assert ticker.semaphore == 0
    wait_for(lambda: manager.show("ActiveState") == "active", "it to be ready")


def test_the_watchdog_ends_one_that_reads_no_more(manager: Manager, ticker: Ticker) -> None:
    manager.set("RestartSec=0\nWatchdogSec=3s\nTimeoutAbortSec=1s")
    manager.do("start", "stapsdtd.service")
    pid = manager.pid()
    with injected(pid, "poll", "error=EINVAL"), Client(manager.target) as client:
        client.subscribe(f"{TICKER}:tick")
        # while there are events, the reader waits with poll()
        ticker.do("fire 1")
        wait_for(
            lambda: manager.pid() not in {0, pid}, "the watchdog to bite, and another one to be started", seconds=60
        )
    assert "stopping watchdog notifications: the thread that reads events ended" in manager.log()


def test_the_watchdog_ends_one_that_hangs(manager: Manager) -> None:
    manager.set("RestartSec=0\nWatchdogSec=3s\nTimeoutAbortSec=1s")
    manager.do("start", "stapsdtd.service")
    hanging = manager.pid()
    os.kill(hanging, signal.SIGSTOP)
    wait_for(
        lambda: manager.pid() not in {0, hanging}, "the watchdog to bite, and another one to be started", seconds=60
    )
    wait_for(lambda: manager.show("ActiveState") == "active", "it to be ready")
    assert int(manager.show("NRestarts")) == 1


_OPENER = "stapsdtd-opener.socket"
_SYS_ADMIN = 1 << 21


def openers(manager: Manager) -> list[str]:
    return re.findall(r"stapsdtd-opener@\S+", manager.do("list-units", "--plain", "stapsdtd-opener@*"))


def test_the_opener_comes_and_goes_with_the_daemon_and_has_one_capability(manager: Manager) -> None:
    # the empty one takes all conditions away
    manager.set(f"ConditionKernelVersion=\nConditionFileIsExecutable={COMMANDS}/stapsdtd-opener", _OPENER, "Unit")
    manager.do("start", "stapsdtd.service")
    assert manager.show("ActiveState", _OPENER) == "active"
    path = f"{manager.root}{SOCKET_PATH}"
    assert os.stat(path).st_mode & 0o777 == 0o600
    opener = PerfOpener(path)

    os.close(opener.open(Kind.MAPPINGS, ALL_PROCESSES, online_cpus()[0]))
    (unit,) = openers(manager)
    pid = int(manager.show("MainPID", unit))
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    for name in ("CapBnd", "CapPrm", "CapEff"):
        assert int(status[name], 16) == _SYS_ADMIN
    for name in ("CapInh", "CapAmb"):
        assert int(status[name], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    # systemd's filter, and its own
    assert int(status["Seccomp_filters"]) > 1

    os.kill(pid, signal.SIGKILL)
    os.close(opener.open(Kind.MAPPINGS, ALL_PROCESSES, online_cpus()[0]))
    wait_for(lambda: len(openers(manager)) == 1, "the one that was killed to be forgotten")
    manager.do("restart", "stapsdtd.service")
    assert manager.show("ActiveState", _OPENER) == "active"
    os.close(opener.open(Kind.MAPPINGS, ALL_PROCESSES, online_cpus()[0]))
    opener.close()
    wait_for(lambda: not openers(manager), "it to end with its connection")

    manager.do("stop", "stapsdtd.service")
    wait_for(lambda: manager.show("ActiveState", _OPENER) == "inactive", "its socket to be closed")
    assert not os.path.exists(path)


@pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 10),
    reason="links are exact for a process since Linux 6.10",
)
def test_there_is_no_opener_where_the_kernel_needs_none(manager: Manager) -> None:
    manager.do("start", "stapsdtd.service")
    assert manager.show("ActiveState", _OPENER) == "inactive"
    assert manager.show("ConditionResult", _OPENER) == "no"
    # as './dev uninstall' does, whether or not there is any
    manager.do("stop", "stapsdtd-opener@*")
