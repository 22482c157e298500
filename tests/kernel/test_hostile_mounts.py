"""Mount points whose names were chosen to do harm: whoever may mount FUSE file systems chooses some."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import COMMANDS, TICKER, Recorder, Ticker, running_daemon

pytestmark = pytest.mark.kernel

_SCRIPT = """
import os, subprocess, sys
point, *command = sys.argv[1:]
os.makedirs(point)
subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
os.execvp(command[0], command)
"""


def beside(point: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command where something is mounted at a point."""
    private = ["unshare", "-m", sys.executable, "-c", _SCRIPT, point]
    return subprocess.run([*private, *map(str, command)], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "name",
    [
        "new\nline",
        "a b\tc",
        "\\040",
        os.fsdecode(b"\xff\xfe"),
        "\r",
        pytest.param("a\x0btracefs", id="named like tracefs"),
    ],
)
def test_tracefs_is_found_beside(tmp_path: Path, name: str) -> None:
    ended = beside(str(tmp_path / name), COMMANDS / "stapsdtd", "--cleanup")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("removed ")


def test_only_tracefs_is_taken_for_tracefs(tmp_path: Path) -> None:
    """Who made the folder would choose which of root's files are written to."""
    (tmp_path / "fake" / "instances").mkdir(parents=True)
    (tmp_path / "fake" / "uprobe_events").touch()
    script = 'umount /sys/kernel/tracing && exec "$0" --cleanup'
    ended = beside(str(tmp_path / "fake\x0btracefs"), "sh", "-c", script, COMMANDS / "stapsdtd")
    assert ended.returncode == 1
    assert "tracefs: it is not mounted" in ended.stderr


OVERLAY_POINTS = (b"plain", b"new\nline", b"\r", b"\x0c", "\x85".encode(), b"\xff\xfe")


def test_hit_in_an_overlay_comes_once(tmp_path: Path, ticker_program: Path) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    shutil.copy(ticker_program, lower / "ticker")
    with running_daemon(tmp_path, "--engine", "bpf") as daemon, ExitStack() as stack:
        tickers = [stack.enter_context(Ticker(lower / "ticker"))]
        for number, name in enumerate(OVERLAY_POINTS):
            folders = [tmp_path / f"{kind}{number}" for kind in ("upper", "work")]
            point = tmp_path / os.fsdecode(name)
            for folder in (*folders, point):
                folder.mkdir()
            options = f"lowerdir={lower},upperdir={folders[0]},workdir={folders[1]}"
            subprocess.run(["mount", "-t", "overlay", "-o", options, "none", str(point)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(point)], check=True)
            tickers.append(stack.enter_context(Ticker(point / "ticker")))
        pids = [ticker.pid for ticker in tickers]
        with Recorder(daemon.target, f"{TICKER}:ticker::tick(arg0)", pids=pids) as recorder:
            for ticker in tickers:
                ticker.do("fire 1")
        assert sorted(event.pid for event in recorder.events) == sorted(pids)
