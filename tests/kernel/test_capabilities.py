"""The capabilities that systemd/stapsdtd.service keeps are enough, and each is needed for something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client, SiteState
from stapsdtd.kernel import function_hooks
from stapsdtd.kernel.connector import QUEUE_BYTES
from stapsdtd.kernel.function_hooks import HookTrials
from stapsdtd.sandbox.processes import worker_ids
from tests.connector import connector_queue_bytes
from tests.support import PYPROGRAM, ROOT, TARGETS, TICKER, Daemon, Recorder, Ticker, require, running_daemon, wait_for
from tests.units import capabilities, with_capabilities

pytestmark = pytest.mark.kernel

_SOMEBODY = 1234
_AS_SOMEBODY = ("setpriv", f"--reuid={_SOMEBODY}", f"--regid={_SOMEBODY}", "--clear-groups")


@pytest.fixture(scope="module", params=["bpf", "ftrace"])
def limited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon as the service manager runs it. It has nothing of the host to complain of."""
    folder, engine = tmp_path_factory.mktemp("limited"), str(request.param)
    with running_daemon(folder, "--engine", engine, prefix=with_capabilities(capabilities())) as daemon:
        yield daemon
        assert "unavailable on this host" not in daemon.log(), daemon.log()


@contextmanager
def program_with_closed_memfd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticker]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Ticker(sys.executable, TARGETS / "provider_program.py", PYPROGRAM) as program:
        program.do("load")
        program.do("close")
        yield program


@contextmanager
def program_of_somebody(ticker_program: Path, folder: Path) -> Iterator[Ticker]:
    """Which nobody else may read, or even reach."""
    home = folder / "home"
    home.mkdir()
    program = shutil.copy(ticker_program, home)
    for path, mode in ((program, 0o500), (home, 0o700)):
        os.chown(path, _SOMEBODY, _SOMEBODY)
        os.chmod(path, mode)
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid():
            # pytest's own folders are closed to somebody, and the loader wants to find its way
            parent.chmod(parent.stat().st_mode | 0o011)
    folder.chmod(0o711)
    with Ticker(*_AS_SOMEBODY, program) as ticker:
        yield ticker


@contextmanager
def program_in_a_mount_namespace(ticker_program: Path, folder: Path) -> Iterator[Ticker]:
    inside = folder / "inside"
    inside.mkdir()
    script = f"mount -t tmpfs none {inside} && cp {ticker_program} {inside}/hidden && exec {inside}/hidden"
    with Ticker("unshare", "-m", "sh", "-c", script) as ticker:
        yield ticker


def probes_of(daemon: Daemon, ticker: Ticker) -> set[str]:
    with Client(daemon.target) as client:
        return {probe.name for probe in client.list_probes([f"{TICKER}:*", f"{PYPROGRAM}:*"], pids=[ticker.pid]).probes}


def lacking(daemon: Daemon) -> set[str]:
    """Return what probes in programs lack."""
    return all_lacking(daemon) - {*function_hooks.NAMES}


def all_lacking(daemon: Daemon) -> set[str]:
    with Client(daemon.target) as client:
        return {feature.name for feature in client.info().features if not feature.available}


def parsing_process(daemon: Daemon) -> int:
    (pid,) = map(int, Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split())
    return pid


def status_of(pid: int, name: str) -> list[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:")).split()[1:]


def test_the_daemon_has_exactly_these(limited: Daemon) -> None:
    kept = int(status_of(limited.pid, "CapEff")[0], 16)
    names = [line.split()[0] for line in subprocess.check_output(["setpriv", "--list-caps"], text=True).splitlines()]
    assert {name for number, name in enumerate(names) if kept >> number & 1} == set(capabilities())
    assert "sys_admin" not in capabilities()


def test_nothing_is_lacking(limited: Daemon) -> None:
    # this process has all capabilities
    assert all_lacking(limited) == {feature.name for feature in HookTrials().features(20) if not feature.available}
    assert connector_queue_bytes(limited.pid) == QUEUE_BYTES


def test_files_are_parsed_behind_all_walls(limited: Daemon) -> None:
    pid = parsing_process(limited)
    user, group = worker_ids()
    assert set(status_of(pid, "Uid")) == {str(user)}
    assert set(status_of(pid, "Gid")) == {str(group)}
    for which in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status_of(pid, which)[0], 16) == 0
    for namespace in ("net", "ipc", "uts"):
        assert os.readlink(f"/proc/{pid}/ns/{namespace}") != os.readlink(f"/proc/{limited.pid}/ns/{namespace}")


def test_list_and_trace(limited: Daemon, ticker: Ticker, ticker_program: Path) -> None:
    assert probes_of(limited, ticker) == {"tick", "values", "text"}
    with Recorder(limited.target, f"{TICKER}:tick(arg0)", f"{TICKER}:text(arg0:str)") as recorder:
        with Ticker(ticker_program) as later:
            assert later.semaphore == 1
            later.do("fire 1")
        assert ticker.do("fire 2") == 1
    assert [event.values for event in recorder.events if event.pid == ticker.pid] == [(0,), (1,)]
    assert [event.values for event in recorder.events if event.pid == later.pid] == [(0,)]
    assert ticker.semaphore == 0


def test_one_process(limited: Daemon, ticker: Ticker) -> None:
    with Recorder(limited.target, f"{TICKER}:tick(arg0)", pids=[ticker.pid]) as recorder:
        ticker.do("fire 1")
    assert recorder.values() == [(0,)]


def test_memfd(limited: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with program_with_closed_memfd(monkeypatch) as program:
        assert probes_of(limited, program) == {"request"}
        with Recorder(limited.target, f"{PYPROGRAM}:request(arg0:str, arg1)") as recorder:
            program.do("fire 2")
    assert recorder.values() == [("/page/0", 0), ("/page/1", 1)]


def test_other_user(limited: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    with program_of_somebody(ticker_program, tmp_path) as ticker:
        # a file that is not root's and takes a moment to parse is known later
        wait_for(lambda: probes_of(limited, ticker), "the program to be parsed")
        assert probes_of(limited, ticker) == {"tick", "values", "text"}
        with Recorder(limited.target, f"{TICKER}:{tmp_path}/home/*::tick(arg0)") as recorder:
            assert ticker.do("fire 2") == 1
    assert recorder.values() == [(0,), (1,)]


def test_other_mount_namespace(limited: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    with program_in_a_mount_namespace(ticker_program, tmp_path) as ticker:
        assert probes_of(limited, ticker) == {"tick", "values", "text"}
        with Recorder(limited.target, f"{TICKER}:{tmp_path}/inside/hidden::tick(arg0)") as recorder:
            assert [site.state for site in recorder.sites] == [SiteState.ARMED]
            assert ticker.do("fire 2") == 1
    assert recorder.values() == [(0,), (1,)]


def _without_bpf(daemon: Daemon) -> None:
    assert lacking(daemon) == {"bpf programs", "overlays' inodes"}
    assert "the ftrace engine is used instead" in daemon.log()


def _without_perfmon(daemon: Daemon) -> None:
    assert lacking(daemon) == {"bpf programs", "mapping records", "overlays' inodes"}


def _without_net_admin(daemon: Daemon) -> None:
    most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    require(most < QUEUE_BYTES, "a bound of sockets' queues that is lower than what the daemon wants")
    # before Linux 6.6 there is no connector at all then
    assert connector_queue_bytes(daemon.pid) in {None, most}


def _parsed_as_root(daemon: Daemon) -> None:
    assert set(status_of(parsing_process(daemon), "Uid")) == {"0"}
    assert "unavailable on this host: user" in daemon.log()


_LACKING: dict[str, Callable[[Daemon], None]] = {
    "bpf": _without_bpf,
    "perfmon": _without_perfmon,
    "net_admin": _without_net_admin,
    "setuid": _parsed_as_root,
    "setgid": _parsed_as_root,
}

_UNSEEN = {
    "sys_ptrace": ("other processes", "a mount namespace"),
    "checkpoint_restore": ("map_files", "a memfd"),
    "dac_read_search": ("files of others", "somebody's"),
}
"""Which feature is told to be missing, and whose probes are not found then."""


def test_each_is_spoken_of_below() -> None:
    assert {*_LACKING, *_UNSEEN} == set(capabilities())


@pytest.mark.parametrize("name", _LACKING)
def test_without_one_something_is_worse(tmp_path: Path, ticker_program: Path, name: str) -> None:
    others = [each for each in capabilities() if each != name]
    with running_daemon(tmp_path, prefix=with_capabilities(others)) as daemon:
        _LACKING[name](daemon)
        with Ticker(ticker_program) as ticker:
            # nothing of it keeps programs that anybody may read from being traced
            wait_for(lambda: probes_of(daemon, ticker), "the program to be listed")
            with Recorder(daemon.target, f"{TICKER}:tick(arg0)", pids=[ticker.pid]) as recorder:
                ticker.do("fire 1")
            assert recorder.values() == [(0,)]


@pytest.mark.parametrize("name", _UNSEEN)
def test_without_one_some_files_are_not_found(
    tmp_path: Path, ticker_program: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    feature, unseen = _UNSEEN[name]
    others = [each for each in capabilities() if each != name]
    # the memfd's descriptor, too, would lead to it until it is closed, so the daemon comes last
    with (
        program_with_closed_memfd(monkeypatch) as memfd,
        program_of_somebody(ticker_program, tmp_path) as somebodys,
        program_in_a_mount_namespace(ticker_program, tmp_path) as hidden,
        running_daemon(tmp_path, prefix=with_capabilities(others)) as daemon,
    ):
        assert lacking(daemon) == {feature}
        assert f"unavailable on this host: {feature};" in daemon.log()
        programs = {"a memfd": memfd, "somebody's": somebodys, "a mount namespace": hidden}
        assert not probes_of(daemon, programs[unseen])
