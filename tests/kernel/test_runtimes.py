"""`stapsdt doctor RUNTIME`, of what is on this host and of programs that say what they are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import Daemon, require, stapsdt_command, wait_for

pytestmark = pytest.mark.kernel


def doctor(daemon: Daemon, runtime: str, path: str) -> tuple[int, list[dict[str, Any]]]:
    command = stapsdt_command(daemon.target, "doctor", runtime, "--json")
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_python_with_probes(daemon: Daemon) -> None:
    require([path for path in [Path("/usr/bin/python3")] if path.exists()], "the system's Python")
    said = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True, check=True).stdout.split()
    status, checks = doctor(daemon, "python", "/usr/bin")
    assert status == 0
    check = next(check for check in checks if check["name"] == f"CPython {said[1]}")
    assert check["available"]
    assert " probes of python" in check["detail"]


def test_a_runtime_without_probes_installed_and_running(daemon: Daemon, tmp_path: Path) -> None:
    program = tmp_path / "node"
    program.write_text(f"#!/bin/sh\necho v18.1.0 {shutil.which('true')}\n")
    program.chmod(0o755)
    hidden = tmp_path / "hidden" / "node"
    hidden.parent.mkdir()
    shutil.copy(str(shutil.which("sleep")), hidden)
    with subprocess.Popen([hidden, "1000"]) as process:
        wait_for(lambda: os.readlink(f"/proc/{process.pid}/exe") == str(hidden), "the program to run")
        status, checks = doctor(daemon, "node", str(tmp_path))
        process.kill()
    assert status == 1
    by_name = {check["name"]: check for check in checks}
    lacking = by_name["Node.js v18.1.0"]
    assert lacking["detail"].endswith("has no probes: it was configured without --with-dtrace")
    assert lacking["remedy"] == "configure it --with-dtrace"
    assert by_name[str(hidden)]["detail"] == f"runs without probes ({process.pid})"


def test_a_runtime_that_is_not_there(daemon: Daemon, tmp_path: Path) -> None:
    status, (check,) = doctor(daemon, "ruby", str(tmp_path))
    assert status == 1
    assert check["detail"] == "there is none in $PATH, and none runs"
