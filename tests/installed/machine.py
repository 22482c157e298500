"""The machine that the tests run on: its service, and commands as root or as an ordinary user."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.client import Client, ClientError, InventoryState, Probe
from tests.semaphores import semaphores
from tests.waiting import TIME_FACTOR, wait_for

ALICE = "alice"
ROOT = "root"
SERVER = "unix:/run/stapsdtd/stapsdtd.sock"
SERVICE = "stapsdtd.service"
SOCKET = "stapsdtd.socket"
TREE = os.environ.get("STAPSDTD_TREE")
"""What was installed, in the guests of tests/vm alone."""
TARGETS = Path(__file__).parent.parent / "targets"
FIRE = "/usr/local/bin/fire"
FOR_EVER = str(10**15)
"""Hits that no test waits for."""
TRACING = Path("/sys/kernel/tracing")
_COMMAND_SECONDS = 60


def identity(user: str) -> dict[str, Any]:
    """Return what subprocess takes for a user as after a login."""
    entry = pwd.getpwnam(user)
    environment = {**os.environ, "HOME": entry.pw_dir, "USER": user}
    groups = os.getgrouplist(user, entry.pw_gid)
    return {
        "user": entry.pw_uid,
        "group": entry.pw_gid,
        "extra_groups": groups,
        "env": environment,
        "cwd": entry.pw_dir,
    }


def run(
    *command: str, user: str = ROOT, check: bool = True, folder: str | None = None, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. check: fail, with what it said, unless its exit code is 0. folder: else the user's."""
    who = identity(user)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds * TIME_FACTOR,
        **(who | ({"cwd": folder} if folder else {})),
    )
    if check and done.returncode:
        pytest.fail(f"'{' '.join(command)}' of {user} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def count(*arguments: str, user: str) -> int:
    """Return what `stapsdt count --json` of heldout:hit came to, which ends with a command or a duration."""
    return counted(run("stapsdt", "count", "heldout:hit", "--json", *arguments, user=user))


def counted(done: subprocess.CompletedProcess[str]) -> int:
    """Return the one number of `stapsdt count --json`; 0 where it printed none."""
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sum(row["count"] for row in rows)


class Running:
    """A command in the background. messages: its lines on standard error, once it has ended."""

    def __init__(self, *command: str, user: str = ROOT) -> None:
        self._command = command
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **identity(user),
        )
        self.pid = self.process.pid

    def wait(self) -> subprocess.CompletedProcess[str]:
        out, err = self.process.communicate(timeout=_COMMAND_SECONDS * TIME_FACTOR)
        return subprocess.CompletedProcess(self._command, self.process.returncode, out, err)

    def interrupt(self) -> subprocess.CompletedProcess[str]:
        """As Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()


@contextmanager
def running(*command: str, user: str = ROOT) -> Iterator[Running]:
    """A command in the background, killed at the end if it has not ended."""
    started = Running(*command, user=user)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@contextmanager
def tracing(*arguments: str, user: str = ROOT) -> Iterator[Running]:
    """A `stapsdt` that has subscribed: what can be armed is armed, and hits count from now on."""
    with Client(SERVER) as client:
        before = {each.id for each in client.subscriptions()}
        with running("stapsdt", *arguments, user=user) as started:

            def is_streaming() -> bool:
                if started.process.poll() is not None:
                    done = started.wait()
                    pytest.fail(f"'{' '.join(arguments)}' ended with {done.returncode}:\n{done.stdout}{done.stderr}")
                return any(each.streaming for each in client.subscriptions() if each.id not in before)

            wait_for(is_streaming, f"'{' '.join(arguments)}' to subscribe", seconds=30)
            yield started


def subscriptions() -> list[str]:
    """Return the ids of the service's subscriptions."""
    with Client(SERVER) as client:
        return [each.id for each in client.subscriptions()]


def systemctl(*arguments: str, check: bool = True) -> str:
    return run("systemctl", *arguments, check=check).stdout.strip()


def show(name: str, unit: str = SERVICE) -> str:
    return systemctl("show", "--value", f"--property={name}", unit)


def unit_setting(name: str) -> list[str]:
    """Return the words of all lines of the service's unit that set a name."""
    lines = [line.partition("=") for line in systemctl("cat", SERVICE).splitlines()]
    return [word for key, _, value in lines if key == name for word in value.split()]


def main_pid() -> int:
    return int(show("MainPID"))


def wait_for_another(pid: int) -> None:
    """Wait until another daemon than the one with this pid serves."""
    wait_for(
        lambda: show("ActiveState") == "active" and main_pid() not in {0, pid}, "another daemon to serve", seconds=60
    )


def wait_for_inventory() -> None:
    """Start the service, as a client does, and wait until it knows the installed files."""
    with Client(SERVER) as client:

        def is_current() -> bool:
            try:
                inventory = client.info().inventory
            except ClientError:
                return False
            return inventory is not None and inventory.state is InventoryState.CURRENT

        wait_for(is_current, "the inventory of installed files", seconds=60)


def journal(cursor: str = "", unit: str = SERVICE) -> list[str]:
    """Return the lines of a unit, since a cursor if there is one."""
    since = ["--after-cursor", cursor] if cursor else []
    return run(
        "journalctl", "--no-pager", "--boot", "--output=short-monotonic", "--unit", unit, *since
    ).stdout.splitlines()


def cursor() -> str:
    """Return where the journal ends now."""
    shown = run("journalctl", "--no-pager", "--lines=1", "--show-cursor", "--output=cat").stdout
    return shown.rpartition("-- cursor: ")[2].strip()


def left_by(pid: int) -> list[str]:
    """Return what a daemon has in tracefs: events and instances are named by its pid."""
    events = (TRACING / "uprobe_events").read_text().splitlines()
    return [name for name in (*events, *os.listdir(TRACING / "instances")) if f"_{pid}_" in name]


def semaphore(pid: int) -> int:
    """Return the value of heldout:hit's in a process that runs `fire`."""
    return sum(semaphores(pid, _probes()).values())


@cache
def _probes() -> list[Probe]:
    with Client(SERVER) as client:
        return list(client.list_probes("heldout:hit", files=[FIRE]).probes)


def dev(*arguments: str) -> str:
    """Run ./dev in the tree that was installed; return what it said. Nothing is downloaded."""
    return run("./dev", *arguments, folder=TREE, seconds=150).stderr
