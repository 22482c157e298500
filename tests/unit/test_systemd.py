"""What systemd's own tools say of the files in systemd/."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stapsdtd.addresses import DEFAULT_ADDRESS
from stapsdtd.config import Config, InventorySettings
from stapsdtd.config.file import load
from stapsdtd.inventory.inventory import state_directory
from stapsdtd.kernel.perf_opener import SOCKET_PATH
from stapsdtd.kernel.places import KPROBE_EVENTS, UPROBE_EVENTS
from stapsdtd.sandbox.processes import USER
from tests.support import require
from tests.units import OPENER_SERVICE, OPENER_SOCKET, SERVICE, SOCKET, UNITS, settings

_MOST_EXPOSED = 45
"""Tenths. systemd calls up to 50 OK; what is below 40 would take hiding what the daemon is there to see."""
_OPENER_EXPOSED = 15
_ALL = (SERVICE, SOCKET, OPENER_SERVICE, OPENER_SOCKET)


def tool(*command: str) -> subprocess.CompletedProcess[str]:
    require(shutil.which(command[0]), command[0])
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def installed(tmp_path: Path) -> list[str]:
    """The units, with programs that exist: to verify is also to look for those."""
    for unit in _ALL:
        text = re.sub(r"/opt/stapsdtd/bin/[\w-]+", sys.executable, unit.read_text())
        (tmp_path / unit.name).write_text(text)
    return [str(tmp_path / unit.name) for unit in _ALL]


def test_units_are_clean(installed: list[str]) -> None:
    verified = tool("systemd-analyze", "verify", "--man=no", *installed)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


@pytest.mark.parametrize(("service", "most_exposed"), [(SERVICE, _MOST_EXPOSED), (OPENER_SERVICE, _OPENER_EXPOSED)])
def test_the_services_are_not_exposed(service: Path, most_exposed: int) -> None:
    rated = tool("systemd-analyze", "security", "--offline=yes", f"--threshold={most_exposed}", str(service))
    assert rated.returncode == 0, rated.stdout
    # systemd's versions differ in what they call an instance
    unit = service.name.replace("@.", r"@\w+.")
    assert re.search(rf"Overall exposure level for {unit}: [0-4]\.[0-9] OK", rated.stdout)


def test_the_opener_is_started_where_the_daemon_asks_it() -> None:
    (path,) = settings(OPENER_SOCKET, "ListenSequentialPacket")
    assert path == SOCKET_PATH
    assert settings(OPENER_SOCKET, "SocketMode") == ["0600"]
    assert settings(OPENER_SOCKET, "DirectoryMode") == ["0700"]
    # containers are given what is there
    assert Path(path).parent != Path(*settings(SOCKET, "ListenStream")).parent
    assert OPENER_SOCKET.name in settings(SERVICE, "Wants")
    assert settings(OPENER_SOCKET, "ConditionFileIsExecutable") == settings(OPENER_SERVICE, "ExecStart")


def test_only_the_opener_has_sys_admin_and_nothing_else() -> None:
    assert settings(OPENER_SERVICE, "CapabilityBoundingSet") == ["CAP_SYS_ADMIN"]
    assert "CAP_SYS_ADMIN" not in settings(SERVICE, "CapabilityBoundingSet")
    assert settings(OPENER_SERVICE, "AmbientCapabilities") == []


def test_the_daemon_listens_where_the_socket_is_and_clients_look() -> None:
    (path,) = settings(SOCKET, "ListenStream")
    assert DEFAULT_ADDRESS.removeprefix("unix:") == path
    assert load(str(UNITS / "stapsdtd.toml")) == Config()
    assert str(Path(path).parent) in settings(SERVICE, "ReadWritePaths")


def test_the_daemon_may_write_where_events_are_defined() -> None:
    writable = {path.removeprefix("-") for path in settings(SERVICE, "ReadWritePaths")}
    assert writable >= {f"/sys/kernel/tracing/{name}" for name in (UPROBE_EVENTS, KPROBE_EVENTS, "instances")}


def test_the_inventory_is_kept_where_the_unit_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service manager names the folder, and without one the daemon takes the same."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    (name,) = settings(SERVICE, "StateDirectory")
    assert state_directory(Config().inventory) == f"/var/lib/{name}"
    monkeypatch.setenv("STATE_DIRECTORY", "/elsewhere:/other")
    assert state_directory(Config().inventory) == "/elsewhere"
    assert state_directory(InventorySettings(state="/mine")) == "/mine"


def test_users_and_folders(tmp_path: Path) -> None:
    planned = tool("systemd-sysusers", "--dry-run", f"--root={tmp_path}", str(UNITS / "stapsdtd.sysusers.conf"))
    assert planned.returncode == 0, planned.stderr
    for what in ("group 'stapsdt'", f"user '{USER}'"):
        assert what in planned.stderr
    if os.geteuid() == 0:
        made = tool("systemd-tmpfiles", "--create", f"--root={tmp_path}", str(UNITS / "stapsdtd.tmpfiles.conf"))
        assert (made.returncode, made.stderr) == (0, "")
        folder = os.stat(tmp_path / "run" / "stapsdtd")
        assert (folder.st_uid, stat.S_IMODE(folder.st_mode)) == (0, 0o755)
