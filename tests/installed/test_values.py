"""What hits carry, of programs of all kinds: providers made at run time, strings nobody has read, long nops, pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Self

import pytest

from tests.installed import machine
from tests.installed.machine import ALICE, ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def shell(*arguments: str, program: str, script: str) -> subprocess.CompletedProcess[str]:
    """Have alice trace a shell script. program: whose probes it is about, which may end before it is noticed."""
    named = ["--file", f"/usr/local/bin/{program}"]
    return machine.run("stapsdt", *arguments, "--json", *named, "--", "sh", "-c", script, user=ALICE)


def test_arguments() -> None:
    selector = "heldout:hit(arg0, arg1:str, arg2)"
    done = machine.run("stapsdt", "trace", selector, "--json", "--", machine.FIRE, "3", user=ALICE)
    assert [row["args"] for row in rows(done)] == [[n, "hello from the held-out program", -3] for n in range(3)]


def test_python() -> None:
    """As README.md asks it. The distribution's interpreter has probes."""
    script = "import gc; [gc.collect() for _ in range(10)]"
    done = machine.run(
        "stapsdt", "count", "python:gc__start", "--json", "--", "/usr/bin/python3", "-c", script, user=ALICE
    )
    assert machine.counted(done) >= 10, done.stderr


class Provider:
    """A program of alice's, in pure Python, that makes its probes when it is told to."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, machine.TARGETS / "provider_program.py", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **machine.identity(ALICE),
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return str(self._process.stdout.readline())

    def do(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def is_enabled(self) -> bool:
        return self.do("enabled") == "enabled 1\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.parametrize(("user", "is_late"), [(ALICE, False), (ALICE, True), (ROOT, True)])
def test_provider_in_python(user: str, is_late: bool) -> None:
    with Provider("madehere") as program:
        if not is_late:
            program.do("load")
        with machine.tracing("trace", "madehere:request(arg0:str, arg1)", "--json", user=user) as tracing:
            if is_late:
                program.do("load")
            wait_for(program.is_enabled, "its probe to be armed")
            program.do("fire 3")
            done = tracing.interrupt()
    assert [row["args"] for row in rows(done)] == [[f"/page/{n}", n] for n in range(3)], done.stderr


def test_values_that_only_the_probe_names() -> None:
    """A string and a number in a page of the program that nobody has read yet."""
    done = shell("trace", "cold:constant(arg0:str, arg1, arg2)", program="cold", script="echo | cold constant 40")
    wanted = [["only the probe names it", -1234567890123, number] for number in range(40)]
    assert [row["args"] for row in rows(done)] == wanted, done.stderr


def test_nops_of_five_bytes() -> None:
    """Neither kernel turns them into calls, so they are armed as others are."""
    done = shell("count", "longnop:*", program="longnop5", script="printf 'leaf 100\\nfork 20\\n' | longnop5 >&2")
    assert "wrong 0" in done.stderr
    assert "child 0" in done.stderr
    assert machine.counted(done) == 100 + 2 * 20, done.stderr


def test_spans() -> None:
    script = "printf 'pairs 3\\nquit\\n' | spanner >/dev/null"
    done = shell("spans", "spanner:begin(arg1, arg2:str)", "spanner:end(arg1)", program="spanner", script=script)
    assert [(row["args"], row["start_args"]) for row in rows(done)] == [([n], [n, f"work {n}"]) for n in range(3)]


def test_latency() -> None:
    script = "printf 'pairs 70\\nquit\\n' | spanner >/dev/null"
    done = shell("latency", "spanner:begin", "spanner:end", program="spanner", script=script)
    (row,) = rows(done)
    assert row["count"] == 70
