"""The provider under the Python of another system, whose packages are kept in .cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from itertools import islice
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.support import PYPROGRAM, ROOT, TARGETS, Daemon, Ticker, require

pytestmark = pytest.mark.kernel

_KEPT = ROOT / ".cache" / "pythons"
_SUITE, _VERSION = "trixie", "3.13"
_PACKAGES = (f"python{_VERSION}-minimal", f"libpython{_VERSION}-stdlib")


@pytest.fixture(scope="module")
def python() -> list[str]:
    """The command of Debian 13's Python. It runs here, with its own C library."""
    root = _KEPT / f"{_SUITE}-{_VERSION}"
    if not root.exists():
        require(shutil.which("mmdebstrap"), "mmdebstrap")
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_KEPT) as name:
            made = Path(name) / "root"
            hooks = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
            options = ["--quiet", "--variant=extract", hooks, f"--include={','.join(_PACKAGES)}"]
            subprocess.run(["mmdebstrap", *options, _SUITE, str(made)], check=True, capture_output=True)
            made.rename(root)
    (loader,) = root.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*")
    return [str(loader), "--library-path", str(loader.parent), str(root / "usr" / "bin" / f"python{_VERSION}")]


@pytest.fixture
def alone(tmp_path: Path, python: list[str]) -> list[str]:
    """The command with what the wheel of stapsdtd-provider has, and nothing else."""
    package = tmp_path / "packages" / "stapsdtd"
    shutil.copytree(ROOT / "stapsdtd" / "provider", package / "provider", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "stapsdtd" / "__init__.py", package)
    home = os.path.dirname(os.path.dirname(python[-1]))
    return ["env", f"PYTHONPATH={package.parent}", f"PYTHONHOME={home}", *python]


def test_events_of_a_newer_python(daemon: Daemon, alone: list[str]) -> None:
    printed = subprocess.run(
        [*alone, "-W", "error", "-c", "import sys, stapsdtd.provider; print(sys.version)"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed.startswith(f"{_VERSION}.")
    with Ticker(*alone, TARGETS / "provider_program.py", PYPROGRAM) as program, Client(daemon.target) as client:
        program.do("load")
        with client.subscribe(f"{PYPROGRAM}:request(arg0:str, arg1)") as subscription:
            assert program.do("fire 2") == 1
            program.do("fork 1")
            events = list(islice(subscription.events(), 3))
        assert [event.values for event in events] == [("/page/0", 0), ("/page/1", 1), ("/child/0", 0)]
        assert program.do("unload") == 0
