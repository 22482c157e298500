"""The programs that run while an example of the documents is tried, or its picture is taken.

PostgreSQL, a JVM and a Python are there all the time. When a command waits for events, the providers that it names fire
in the same order each time: SQL statements, a Python that imports `json`, a short Java program, the demo's shop. For
`stapsdt top`, the first of them goes on until the command ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from stapsdtd.client import Client
from tests.kernel.test_openjdk import IdleJvm, Java, java_home
from tests.kernel.test_postgresql import Session, running_cluster
from tests.support import COMMANDS, SYSTEM_PYTHON, require, wait_for
from tests.terminal import run_on_terminal

STATEMENTS = (
    "BEGIN;",
    "SELECT name FROM products;",
    "UPDATE stock SET count = 16;",
    "COMMIT;",
)
_TABLES = (
    "CREATE TEMPORARY TABLE products (name text);",
    "CREATE TEMPORARY TABLE stock (count int);",
)
_COLLECTING = ("-XX:+UseSerialGC", "-Xmn1m")
"""So little memory for new objects that even a short program collects garbage."""
_PYTHON = (SYSTEM_PYTHON, "-S", "-I", "-c")


class Stage:
    """Runs commands against a daemon, and lets the programs do something when a command waits for their events."""

    def __init__(self, target: str, session: Session, java: Java) -> None:
        self.target = target
        self._actions: dict[str, Callable[[], object]] = {
            "postgresql": lambda: session.do(*STATEMENTS),
            "python": lambda: subprocess.run([*_PYTHON, "import json"], check=True),
            "hotspot": partial(java.run, *_COLLECTING),
            "hs_private": partial(java.run, *_COLLECTING),
            "shop": lambda: subprocess.run(
                [sys.executable, "-m", "stapsdtd.demo.shop", "12"], check=True, stdout=subprocess.DEVNULL
            ),
        }

    def run(self, command: str, *, source: str = "", columns: int = 120, interrupts: bool = False) -> str:
        """Return what a command prints on a terminal, with its escape sequences.

        source: where the command names the providers that it waits for, if not in its line. interrupts: press Ctrl-C
        once they have fired.
        """
        environment = {
            "PATH": f"{COMMANDS}:{os.environ['PATH']}",
            "STAPSDT_SERVER": self.target,
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        }

        def act(process: subprocess.Popen[bytes]) -> None:
            self._act(source or command, process)
            if interrupts and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)

        return run_on_terminal(command, environment, act, columns=columns)

    def _act(self, source: str, process: subprocess.Popen[bytes]) -> None:
        """Have the providers fire that the source names, once it waits for events; nothing if it waits for none."""
        with Client(self.target) as client:
            wait_for(
                lambda: process.poll() is not None or any(each.streaming for each in client.subscriptions()),
                f"its end, or its stream: {source}",
            )
        actions = [act for provider, act in self._actions.items() if f"{provider}:" in source]
        for act in actions:
            if process.poll() is None:
                act()
        while actions and "stapsdt top" in source and process.poll() is None:
            actions[0]()


@contextmanager
def staged(target: str) -> Iterator[Stage]:
    """Start the programs, and wait until a daemon knows their probes."""
    require(os.path.exists(SYSTEM_PYTHON), SYSTEM_PYTHON)
    java = Java(java_home())
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster())
        session = stack.enter_context(Session(cluster))
        session.do(*_TABLES)
        stack.enter_context(IdleJvm(java))
        stack.enter_context(_idle_python())
        client = stack.enter_context(Client(target))
        for path in (cluster.path, java.libjvm, str(Path(SYSTEM_PYTHON).resolve())):
            wait_for(partial(client.list_probes, f":{path}::"), f"the probes of {path}")
        yield Stage(target, session, java)


@contextmanager
def _idle_python() -> Iterator[None]:
    with subprocess.Popen([*_PYTHON, "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()
