"""The first hits of probes that a program makes while it runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stapsdtd.provider.waiting import DEFAULT_SOCKET, SOCKET_VARIABLE
from tests.support import ROOT, Daemon, Recorder, compile_once

pytestmark = pytest.mark.kernel

PROGRAMS = 20
PROVIDER = f"p{os.getpid()}short"
FIRE_ONCE = f"""
import sys
from stapsdtd.provider import INT32, Provider
provider = Provider("{PROVIDER}")
run = provider.probe("run", INT32)
provider.load(float(sys.argv[2]))
run.fire(int(sys.argv[1]))
"""
LOAD_ONCE = """
#include <dlfcn.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	void (*call)(int) = (void (*)(int))dlsym(dlopen(argv[1], RTLD_NOW), "library_call");

	wait_until_armed();
	call(atoi(argv[2]));
	return 0;
}
"""


def socket_of(daemon: Daemon) -> str:
    listening = Path(daemon.target.removeprefix("unix:"))
    return str(listening.parent / "provider" / listening.name)


def fire_once(number: int, socket: str, wait_seconds: float) -> None:
    subprocess.run(
        [sys.executable, "-c", FIRE_ONCE, str(number), str(wait_seconds)],
        env={**os.environ, SOCKET_VARIABLE: socket},
        check=True,
        timeout=60,
    )


def test_first_hit_of_a_memfd(daemon: Daemon) -> None:
    """The probe of each program fires once, at once, and the program is over."""
    with Recorder(daemon.target, f"{PROVIDER}:run(arg0)") as recorder:
        for number in range(PROGRAMS):
            fire_once(number, socket_of(daemon), wait_seconds=30)
    account = recorder.finish()
    assert [event.values[0] for event in recorder.events] == list(range(PROGRAMS))
    assert (account.fired, account.lost) == (PROGRAMS, 0)


def c_example() -> str:
    """Return the C function of docs/python.md."""
    (source,) = re.findall(r"^```c\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    return str(source)


def test_first_hit_of_a_library_that_a_c_program_loads(daemon: Daemon, library: Path, tmp_path: Path) -> None:
    assert DEFAULT_SOCKET in c_example()
    # the document's limit of time is for programs that must not wait; a test must not fail on a busy host
    function = c_example().replace(DEFAULT_SOCKET, socket_of(daemon)).replace(", 100)", ", 30000)")
    source = tmp_path / "program.c"
    source.write_text(function + LOAD_ONCE)
    program = compile_once(source, tmp_path / "program", ["gcc", "-Wall", "-Werror"], ["-ldl"])
    with Recorder(daemon.target, f"library:{tmp_path}/*::called(arg0)") as recorder:
        for number in range(PROGRAMS):
            loaded = Path(shutil.copy(library, tmp_path / f"library{number}.so"))
            subprocess.run([program, loaded, str(number)], check=True, timeout=60)
    account = recorder.finish()
    assert [event.values[0] for event in recorder.events] == list(range(PROGRAMS))
    assert (account.fired, account.lost) == (PROGRAMS, 0)


def test_a_program_does_not_wait_for_a_daemon_that_is_stopped(own_daemon: Daemon) -> None:
    own_daemon.process.send_signal(signal.SIGSTOP)
    try:
        fire_once(0, socket_of(own_daemon), wait_seconds=0.01)
    finally:
        own_daemon.process.send_signal(signal.SIGCONT)


def test_nothing_is_left_behind(own_daemon: Daemon) -> None:
    assert Path(socket_of(own_daemon)).is_socket()
    own_daemon.kill()
    own_daemon.restart()
    fire_once(0, socket_of(own_daemon), wait_seconds=30)
    assert own_daemon.stop() == 0
    assert not Path(socket_of(own_daemon)).exists()
