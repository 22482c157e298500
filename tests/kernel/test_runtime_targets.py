"""`stapsdt doctor [RUNTIME] PID|PATH`, of the interpreters and JVMs of this host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.client import Client
from tests.kernel.test_openjdk import java_home
from tests.support import SYSTEM_PYTHON, Daemon, require, running_daemon, stapsdt_command, wait_for
from tests.users import ANNE, public_folder

pytestmark = pytest.mark.kernel

METHODS = "-XX:+DTraceMethodProbes"


def doctor(daemon: Daemon, *words: object, user: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
    command = stapsdt_command(daemon.target, "doctor", *map(str, words), "--json")
    done = subprocess.run([*user, *command], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def found(checks: list[dict[str, Any]], text: str) -> dict[str, Any]:
    (check,) = [each for each in checks if text in each["detail"]]
    return check


@contextmanager
def running(*command: str | Path, **environment: str) -> Iterator[int]:
    """The pid of a program that waits for its standard input to end."""
    process = subprocess.Popen(
        [*command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )  # fmt: skip
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@contextmanager
def jvm(daemon: Daemon, *options: str, **environment: str) -> Iterator[int]:
    keytool = ("-m", "java.base/sun.security.tools.keytool.Main", "-printcert")
    with running(java_home() / "bin/java", *options, *keytool, **environment) as pid, Client(daemon.target) as client:
        wait_for(lambda: client.list_probes(["hotspot:*"], pids=[pid]).probes, "libjvm.so to be mapped")
        yield pid


@pytest.mark.parametrize("runtime", [("python",), ()], ids=["told", "known"])
def test_a_process_of_python(daemon: Daemon, runtime: tuple[str, ...]) -> None:
    require(os.path.exists(SYSTEM_PYTHON), SYSTEM_PYTHON)
    with running(SYSTEM_PYTHON, "-c", "input()") as pid:
        wait_for(lambda: os.readlink(f"/proc/{pid}/exe") == SYSTEM_PYTHON, "it to run")
        status, checks = doctor(daemon, *runtime, pid)
    assert status == 0
    assert checks[0]["name"] == f"process {pid}"
    assert f"{SYSTEM_PYTHON} has 8 probes of python: audit, function__entry" in checks[0]["detail"]
    assert "3.11 fires it only in threads with a trace function" in found(checks, "python:function__entry")["detail"]
    assert found(checks, f"you may trace process {pid}")["available"]


def test_the_file_of_python(daemon: Daemon) -> None:
    require(os.path.exists(SYSTEM_PYTHON), SYSTEM_PYTHON)
    status, checks = doctor(daemon, "/usr/bin/python3")
    assert status == 0
    assert "8 probes of python" in checks[0]["detail"]
    assert len([each for each in checks if "probes of python" in each["detail"]]) == 1
    status, same = doctor(daemon, "python", SYSTEM_PYTHON)
    assert (status, len(same)) == (0, len(checks))


def test_a_python_without_probes(daemon: Daemon, tmp_path: Path) -> None:
    lacking = Path(shutil.copy(str(shutil.which("sleep")), tmp_path / "python3.12"))
    cause = "has no probes of python: it was configured without --with-dtrace"
    status, (check,) = doctor(daemon, lacking)
    assert status == 1
    assert check["detail"] == f"{lacking} {cause}"
    assert check["remedy"].startswith("configure it --with-dtrace")
    with running(lacking, "1000") as pid:
        wait_for(lambda: os.readlink(f"/proc/{pid}/exe") == str(lacking), "it to run")
        status, checks = doctor(daemon, pid)
    assert status == 1
    assert checks[0]["detail"] == f"{lacking} {cause}"


@pytest.mark.parametrize(("runtime", "provider"), [("python", "python"), ("java", "hotspot")])
def test_another_program_is_not_one_of_the_runtime(daemon: Daemon, runtime: str, provider: str) -> None:
    sleep = os.path.realpath(str(shutil.which("sleep")))
    told = f"{sleep} has no probes of {provider}: by the names of its files, it is another program"
    with running(sleep, "1000") as pid:
        wait_for(lambda: os.readlink(f"/proc/{pid}/exe") == sleep, "it to run")
        status, checks = doctor(daemon, runtime, pid)
    assert (status, checks[0]["detail"]) == (1, told)
    assert checks[0]["remedy"] == f"ask without the runtime: stapsdt doctor {pid}"
    # a library of the system's python3 lies near
    status, (check,) = doctor(daemon, runtime, sleep)
    assert (status, check["detail"]) == (1, told)


def test_switches_of_a_jvm(daemon: Daemon) -> None:
    with jvm(daemon, METHODS) as pid:
        status, checks = doctor(daemon, "java", pid)
    assert status == 0
    assert "probes of hotspot and hotspot_jni: " in checks[0]["detail"]
    started = found(checks, "hotspot:method__entry")
    assert started["available"]
    assert started["detail"].endswith(f"with which process {pid} was started")
    lacking = found(checks, "hotspot:monitor__*")
    assert not lacking["available"]
    assert lacking["detail"].endswith(f"-XX:+DTraceMonitorProbes, and process {pid} was started without it")
    assert "-XX:+ExtendedDTraceProbes" in lacking["remedy"]


def test_switches_in_the_environment_and_in_files(daemon: Daemon, tmp_path: Path) -> None:
    with jvm(daemon, JAVA_TOOL_OPTIONS="-XX:+ExtendedDTraceProbes") as pid:
        _, checks = doctor(daemon, pid)
    assert all(each["available"] for each in checks)
    (tmp_path / "options").write_text(METHODS)
    with jvm(daemon, f"@{tmp_path}/options") as pid:
        _, checks = doctor(daemon, pid)
    assert found(checks, "hotspot:method__entry")["remedy"] == f"see what it uses: jcmd {pid} VM.flags"


def test_the_file_of_java(daemon: Daemon) -> None:
    library = java_home() / "lib/server/libjvm.so"
    for path in (java_home() / "bin/java", library):
        status, checks = doctor(daemon, path)
        assert status == 0
        assert "of hotspot" in checks[0]["detail"]
        assert any(METHODS in each["detail"] for each in checks)


def test_what_is_no_program(daemon: Daemon, tmp_path: Path) -> None:
    script, text = tmp_path / "run", tmp_path / "text"
    script.write_text("#!/bin/sh\n")
    text.write_text("text")
    for path, detail in {
        script: "it is a script", text: "it is no ELF file", tmp_path: "it is a directory",
        tmp_path / "missing": "there is no such file",
    }.items():  # fmt: skip
        status, (check,) = doctor(daemon, path)
        assert (status, check["available"]) == (1, False)
        assert check["detail"].startswith(detail)
        assert check["remedy"]


def test_what_is_no_process(daemon: Daemon) -> None:
    status, (check,) = doctor(daemon, 2**22 + 1)
    assert (status, check["detail"]) == (1, "there is no such process")
    status, (check,) = doctor(daemon, 2)
    assert check["detail"].startswith(("it has no program", "there is no such process"))
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    _, (check,) = doctor(daemon, thread.native_id)
    waiting.set()
    thread.join()
    assert check["remedy"] == f"type: stapsdt doctor {os.getpid()}"


def test_another_mount_namespace(daemon: Daemon) -> None:
    with running("unshare", "-m", SYSTEM_PYTHON, "-c", "input()") as pid:
        wait_for(lambda: os.readlink(f"/proc/{pid}/exe") == SYSTEM_PYTHON, "it to run")
        status, checks = doctor(daemon, pid)
    assert status == 0
    assert f"--file /proc/{pid}/root{SYSTEM_PYTHON}" in found(checks, "another mount namespace")["detail"]


# with the other one, users trace nothing
@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_processes_of_others(engine: str) -> None:
    with public_folder() as folder, running_daemon(folder, "--engine", engine) as daemon:
        os.chmod(daemon.target.removeprefix("unix:"), 0o666)
        with (
            running(SYSTEM_PYTHON, "-c", "input()") as roots,
            running(*ANNE.command(SYSTEM_PYTHON, "-c", "input()")) as own,
        ):
            wait_for(lambda: os.readlink(f"/proc/{own}/exe") == SYSTEM_PYTHON, "it to run")
            user = tuple(ANNE.command())
            status, checks = doctor(daemon, roots, user=user)
            assert status == 1
            assert checks[0]["detail"] == "its probes are not shown to you"
            assert f"does not allow tracing process {roots}" in found(checks, "does not allow")["detail"]
            assert "run this as root" in found(checks, "does not allow")["remedy"]
            status, checks = doctor(daemon, own, user=user)
            assert status == 0
            assert found(checks, f"you may trace process {own}")["available"]
