"""What the service finds on the host: installed files, functions of the kernel, cgroups, and what the kernel offers."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.installed import machine
from tests.installed.machine import ALICE, FIRE, ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

HITS = 500
_UNIT = "firing.service"
_UNITS = Path("/run/systemd/system")


def test_list_installed() -> None:
    listed = machine.run("stapsdt", "list", "--installed", "heldout:*", user=ALICE).stdout.splitlines()
    assert [line.split("\t")[0] for line in listed] == ["heldout:hit"]
    assert FIRE in listed[0]


def test_list_shows_running_programs() -> None:
    with machine.running(FIRE, "1", "1", "1", user=ALICE) as fire:

        def pids() -> str:
            return machine.run("stapsdt", "list", "heldout:hit", check=False).stdout

        wait_for(lambda: str(fire.pid) in pids(), "the program to be listed")


def test_doctor_misses_nothing_that_the_kernel_has() -> None:
    done = machine.run("stapsdt", "doctor", "--json", check=False)
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    missing = {check["name"] for check in checks if not check["available"]}
    config = Path(f"/boot/config-{platform.release()}").read_text()
    lacking = set() if "CONFIG_FPROBE=y" in config else {"kprobe.multi"}
    assert missing == lacking, done.stdout
    assert done.returncode == 0


def test_bpf_is_the_engine() -> None:
    assert json.loads(machine.run("stapsdt", "info", "--json").stdout)["engine"] == "bpf"


def test_kernel_function() -> None:
    selector = "vfs_read(count, return)"
    # whoever reads, such as this command itself, is seen
    done = machine.run("stapsdt", "kernel", "trace", selector, "--count", "3", "--json")
    assert len(done.stdout.splitlines()) == 3, done.stderr


def test_kernel_function_of_a_command() -> None:
    selector = "vfs_read(count == 777, return)"
    script = "import os; f = os.open('/dev/zero', 0); [os.read(f, 777) for _ in range(5)]"
    done = machine.run("stapsdt", "kernel", "trace", selector, "--json", "--", "/usr/bin/python3", "-S", "-c", script)
    assert done.stdout.count("777") >= 5, done.stdout + done.stderr


def test_kernel_functions_are_not_for_users() -> None:
    done = machine.run("stapsdt", "kernel", "trace", "vfs_read", "--count", "1", user=ALICE, check=False)
    assert done.returncode == 1
    assert "vfs_read" in done.stderr or "functions" in done.stderr
    assert "Operation not permitted" not in done.stderr


@contextmanager
def firing_unit(user: str) -> Iterator[None]:
    """A unit whose program fires once it is traced."""
    text = f"[Service]\nUser={user}\nExecStart={FIRE} {HITS} 1 1\nRemainAfterExit=yes\n"
    (_UNITS / _UNIT).write_text(text)
    machine.systemctl("daemon-reload")
    machine.systemctl("start", _UNIT)
    try:
        yield
    finally:
        machine.systemctl("stop", _UNIT)
        (_UNITS / _UNIT).unlink()
        machine.systemctl("daemon-reload")


@pytest.mark.parametrize(("user", "name"), [(ALICE, _UNIT), (ROOT, f"/system.slice/{_UNIT}")])
def test_unit_as_cgroup(user: str, name: str) -> None:
    with (
        firing_unit(ALICE),
        machine.tracing("count", "heldout:hit", "--json", "--cgroup", name, user=user) as counting,
    ):
        wait_for(lambda: machine.show("SubState", _UNIT) == "exited", "the unit's program to end", seconds=60)
        # in another cgroup
        machine.run(FIRE, "7", user=ALICE)
        done = counting.interrupt()
    assert machine.counted(done) == HITS, done.stderr


def test_container() -> None:
    """One of systemd-nspawn, whose /usr is the host's."""
    box = ["systemd-nspawn", "--quiet", "--directory=/", "--volatile=yes", "--machine=box", "--register=no"]
    with (
        machine.tracing("count", "heldout:hit", "--json", "--by", "container,execname") as counting,
        machine.running(*box, "/bin/sh", "-c", f"{FIRE} {HITS}; sleep infinity") as inside,
    ):
        assert inside.process.stdout is not None
        assert inside.process.stdout.readline(), inside.wait().stderr
        cgroups = machine.run("systemd-cgls", "--all", "--full", "--no-pager").stdout
        machine.run(FIRE, "7", user=ALICE)
        done = counting.interrupt()
    counts = [(row["key"], row["count"]) for row in map(json.loads, done.stdout.splitlines())]
    assert counts == [(["box", "fire"], HITS), (["", "fire"], 7)], f"{done.stderr}\n{cgroups}"
