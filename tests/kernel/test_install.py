"""`./dev install` and `./dev uninstall`, into a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stapsdtd.cli import manual
from tests.daemon_image import copy_sources
from tests.support import TICKER, Recorder, Ticker, running_daemon, stapsdt
from tests.units import OPENER_SERVICE, OPENER_SOCKET, SERVICE, UNITS, settings

pytestmark = pytest.mark.kernel

_UNITS = "usr/local/lib"
_PREFIX = "opt/stapsdtd"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    copy_sources(folder)
    return folder


def dev(checkout: Path, root: Path, *arguments: str) -> str:
    """Answer what it says."""
    done = subprocess.run(
        ["./dev", *arguments],
        cwd=checkout,
        env={**os.environ, "DESTDIR": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def files(root: Path) -> set[str]:
    """All but the environment's."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or path.is_symlink()}
    return {name for name in found if not name.startswith(f"{_PREFIX}/")}


def at_its_place(root: Path) -> list[str]:
    """A command that runs what is installed in a root in place of the command that follows it."""
    script = """
    set -e
    mount -t tmpfs none /opt
    mkdir /opt/stapsdtd
    mount --bind "$0" /opt/stapsdtd
    shift
    exec /opt/stapsdtd/bin/stapsdtd "$@"
    """
    return ["unshare", "-m", "sh", "-c", script, str(root / _PREFIX)]


@pytest.mark.timeout(300)
def test_install_serve_uninstall(checkout: Path, tmp_path: Path, ticker: Ticker) -> None:
    root = tmp_path / "root"
    older = root / _PREFIX / "lib" / "older.py"
    older_settings = root / "etc" / "stapsdtd" / "stapsdtd.toml"
    for path in (older, older_settings):
        path.parent.mkdir(parents=True)
        path.write_text("# older\n")

    assert "stays as it is" in dev(checkout, root, "install")
    installed = {
        "etc/stapsdtd/stapsdtd.toml": None,
        "usr/local/bin/stapsdt": None,
        "usr/local/bin/stapsdtd": None,
        f"{_UNITS}/systemd/system/stapsdtd.service": SERVICE,
        f"{_UNITS}/systemd/system/stapsdtd.socket": UNITS / "stapsdtd.socket",
        f"{_UNITS}/systemd/system/stapsdtd-opener.socket": OPENER_SOCKET,
        f"{_UNITS}/systemd/system/stapsdtd-opener@.service": OPENER_SERVICE,
        f"{_UNITS}/sysusers.d/stapsdtd.conf": UNITS / "stapsdtd.sysusers.conf",
        f"{_UNITS}/tmpfiles.d/stapsdtd.conf": UNITS / "stapsdtd.tmpfiles.conf",
    }
    assert files(root) == set(installed) | {f"usr/local/share/man/man1/{name}.1" for name, _ in manual.pages()}
    for name, source in installed.items():
        if source is not None:
            assert (root / name).read_text() == source.read_text()
    assert older_settings.read_text() == "# older\n"
    assert not older.exists()
    for program in ("stapsdt", "stapsdtd"):
        assert os.readlink(root / "usr" / "local" / "bin" / program) == f"/opt/stapsdtd/bin/{program}"

    (opener,) = settings(OPENER_SERVICE, "ExecStart")
    assert os.access(f"{root}{opener}", os.X_OK)

    with running_daemon(tmp_path, "--config", str(older_settings), prefix=at_its_place(root)) as daemon:
        assert os.readlink(f"/proc/{daemon.pid}/exe").startswith("/opt/stapsdtd/bin/python")
        assert "bpf" in stapsdt(daemon.target, "info").stdout
        with Recorder(daemon.target, f"{TICKER}:tick(arg0)", pids=[ticker.pid]) as recorder:
            ticker.do("fire 2")
        assert recorder.values() == [(0,), (1,)]

    assert "stapsdtd stays (--purge removes it)" in dev(checkout, root, "uninstall")
    assert files(root) == {"etc/stapsdtd/stapsdtd.toml"}
    assert not (root / _PREFIX).exists()
    assert not list((root / _UNITS).iterdir())
    state = root / "var" / "lib" / "stapsdtd"
    state.mkdir(parents=True)
    (state / "inventory").touch()
    dev(checkout, root, "uninstall", "--purge")
    assert files(root) == set()
    assert dev(checkout, root, "uninstall") == "dev: uninstalled\n"
