"""What an ordinary user, and root, see of programs of theirs: each hit, whichever way it is asked for."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.installed import machine
from tests.installed.machine import ALICE, FIRE, ROOT

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

HITS = 500
_D = 'heldout$target:::hit { @n = count(); } END { printa("n=%@d\\n", @n); }'


def start_fire(*arguments: str, user: str = ALICE) -> subprocess.CompletedProcess[str]:
    return machine.run(FIRE, str(HITS), "1", *arguments, user=user)


@pytest.mark.parametrize("user", [ALICE, ROOT])
def test_command(user: str) -> None:
    assert machine.count("--", FIRE, str(HITS), user=user) == HITS


def test_file() -> None:
    with machine.tracing("count", "heldout:hit", "--json", "--file", FIRE, user=ALICE) as counting:
        start_fire()
        done = counting.interrupt()
    assert machine.counted(done) == HITS, done.stderr


@pytest.mark.parametrize("user", [ALICE, ROOT])
def test_pid(user: str) -> None:
    with machine.running(FIRE, str(HITS), "1", "1", user=ALICE) as fire:
        # its semaphore has it go on, and the count ends with it
        assert machine.count("--pid", str(fire.pid), user=user) == HITS


def test_running_program_without_a_scope() -> None:
    with (
        machine.running(FIRE, str(HITS), "1", "1", user=ALICE) as fire,
        machine.tracing("count", "heldout:hit", "--json", user=ALICE) as counting,
    ):
        fire.wait()
        done = counting.interrupt()
    assert machine.counted(done) == HITS, done.stderr
    assert "no probe matched" not in done.stderr


def test_installed_and_started_later() -> None:
    with machine.tracing("count", "heldout:hit", "--json", user=ALICE) as counting:
        start_fire()
        done = counting.interrupt()
    assert machine.counted(done) == HITS, done.stderr


def test_d() -> None:
    done = machine.run("stapsdt", "d", "-q", "-c", f"{FIRE} {HITS}", "-n", _D, user=ALICE)
    assert f"n={HITS}" in done.stdout.splitlines()


def test_users_see_nothing_of_others() -> None:
    with machine.tracing("count", "heldout:hit", "--json", user=ALICE) as counting:
        start_fire(user=ROOT)
        done = counting.interrupt()
    assert machine.counted(done) == 0


def test_killed_daemon_is_replaced() -> None:
    killed = machine.main_pid()
    os.kill(killed, signal.SIGKILL)
    machine.wait_for_another(killed)
    assert machine.count("--", FIRE, str(HITS), user=ALICE) == HITS
    assert not machine.left_by(killed)
