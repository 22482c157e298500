"""`./dev uninstall`, the last test: nothing is left but what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.installed import machine
from tests.installed.machine import FIRE, FOR_EVER

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

_GONE = (
    "/opt/stapsdtd", "/usr/local/bin/stapsdt", "/usr/local/bin/stapsdtd", "/run/stapsdtd", "/run/stapsdtd-opener",
    "/usr/local/lib/systemd", "/usr/local/lib/sysusers.d", "/usr/local/lib/tmpfiles.d",
)  # fmt: skip
_PURGED = ("/etc/stapsdtd", "/var/lib/stapsdtd")


def test_nothing_is_left() -> None:
    pid = machine.main_pid()
    with (
        machine.running(FIRE, FOR_EVER, user=machine.ALICE) as load,
        machine.tracing("count", "heldout:hit", "--no-retry", "--pid", str(load.pid)) as counting,
    ):
        assert machine.semaphore(load.pid) == 1
        machine.dev("uninstall")
        assert "the server stopped" in counting.wait().stderr
        assert machine.semaphore(load.pid) == 0
    assert not machine.left_by(pid)
    assert not [path for path in _GONE if Path(path).exists()]
    units = machine.run("systemctl", "list-units", "--all", "--no-legend", "--plain", "stapsdtd*").stdout
    assert not units.strip()
    assert not machine.run("systemctl", "list-unit-files", "--no-legend", "stapsdtd*", check=False).stdout.strip()
    assert machine.run("getent", "passwd", "stapsdt-parse", check=False).returncode
    assert machine.run("getent", "group", "stapsdt").stdout
    assert all(Path(path).exists() for path in _PURGED)
    machine.dev("uninstall", "--purge")
    assert not [path for path in _PURGED if Path(path).exists()]
    assert machine.run("getent", "group", "stapsdt", check=False).returncode
