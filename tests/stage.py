"""The programs that run while an example of the documents is tried, or its picture is taken.

PostgreSQL, a JVM, a Python and a C++ program are there all the time. When a command waits for events, the providers
that it names fire in the same order each time: SQL statements, a Python that imports `json`, a short Java program, C++
exceptions, the demo's shop. Where it names probes of PostgreSQL's locks, sorts or checkpoints, these happen. For
`stapsdt top`, the first of them goes on until the command ends.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stapsdtd.client import Client
from tests.kernel.test_libstdcxx import Thrower
from tests.kernel.test_openjdk import IdleJvm, Java, java_home
from tests.kernel.test_postgresql import Cluster, Session, contend, running_cluster
from tests.support import COMMANDS, SYSTEM_PYTHON, TARGETS, compile_once, require, wait_for
from tests.terminal import run_on_terminal

STATEMENTS = (
    "BEGIN;",
    "SELECT name FROM products;",
    "UPDATE stock SET count = 16;",
    "COMMIT;",
)
_SORT = (
    "SET work_mem = '64kB';",
    "SELECT count(*) FROM (SELECT n FROM generate_series(1, 50000) AS n ORDER BY -n) AS sorted;",
    "RESET work_mem;",
)
_TABLES = (
    "CREATE TABLE IF NOT EXISTS orders (number int);",
    "CREATE TEMPORARY TABLE products (name text);",
    "CREATE TEMPORARY TABLE stock (count int);",
)
_COLLECTING = ("-XX:+UseSerialGC", "-Xmn1m")
"""So little memory for new objects that even a short program collects garbage."""
_PYTHON = (SYSTEM_PYTHON, "-S", "-I", "-c")


@dataclass(frozen=True, slots=True)
class Programs:
    """What fires. sessions: of the cluster, where pgbench can run, too."""

    cluster: Cluster
    sessions: tuple[Session, Session]
    java: Java
    thrower: Thrower


class Stage:
    """Runs commands against a daemon, and lets the programs do something when a command waits for their events."""

    def __init__(self, target: str, folder: Path, programs: Programs) -> None:
        """folder: where commands run, with the D and Java programs that they name."""
        self.target = target
        self._folder = folder
        self._cluster = programs.cluster
        session, other = programs.sessions
        self._actions: dict[str, dict[str, Callable[[], object]]] = {
            "postgresql": {
                r"\block(__|-)wait": partial(contend, other, session, "orders"),
                r"sort(__|-)": partial(session.do, *_SORT),
                r"buffer(__|-)|lwlock(__|-)": partial(session.do, "SELECT count(*) FROM pgbench_accounts;"),
                r"checkpoint(__|-)": partial(session.do, "CHECKPOINT;"),
                "": partial(session.do, *STATEMENTS),
            },
            "python": {"": lambda: subprocess.run([*_PYTHON, "import json"], check=True)},
            "hotspot": {"": partial(programs.java.run, *_COLLECTING)},
            "hs_private": {"": partial(programs.java.run, *_COLLECTING)},
            "libstdcxx": {"": partial(programs.thrower.do, "nested 3")},
            "shop": {
                "": lambda: subprocess.run(
                    [sys.executable, "-m", "stapsdtd.demo.shop", "12"], check=True, stdout=subprocess.DEVNULL
                )
            },
        }
        """By provider and, the most special first, what else the source says."""

    def run(self, command: str, *, source: str = "", columns: int = 120, interrupts: bool = False) -> str:
        """Return what a command prints on a terminal, with its escape sequences.

        source: where the command names the providers that it waits for, if not in its line. interrupts: press Ctrl-C
        once they have fired.
        """
        environment = {
            "PATH": f"{COMMANDS}:{self._cluster.programs}:{os.environ['PATH']}",
            "PGHOST": str(self._cluster.folder),
            "PGUSER": "postgres",
            "PGDATABASE": "postgres",
            "STAPSDT_SERVER": self.target,
            "TERM": "xterm-256color",
            "LC_ALL": "C.UTF-8",
        }

        def act(process: subprocess.Popen[bytes]) -> None:
            self._act(source or command + self._scripts(command), process)
            if interrupts and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)

        return run_on_terminal(command, environment, act, folder=self._folder, columns=columns)

    def _scripts(self, command: str) -> str:
        """Return the D programs that a command names."""
        return "".join((self._folder / name).read_text() for name in re.findall(r"s (\S+\.d)\b", command))

    def _act(self, source: str, process: subprocess.Popen[bytes]) -> None:
        """Have the providers fire that the source names, once it waits for events; nothing if it waits for none."""
        with Client(self.target) as client:
            wait_for(
                lambda: process.poll() is not None or any(each.streaming for each in client.subscriptions()),
                f"its end, or its stream: {source}",
            )
        actions = self._named(source)
        for act in actions:
            if process.poll() is None:
                act()
        while actions and "stapsdt top" in source and process.poll() is None:
            actions[0]()

    def _named(self, source: str) -> list[Callable[[], object]]:
        """Return what the providers do that a source names, as postgresql:, postgresql*: or postgresql$target:."""
        return [
            next(act for what, act in actions.items() if re.search(what, source))
            for provider, actions in self._actions.items()
            if re.search(rf"\b{provider}[*$\w]*:", source)
        ]


@contextmanager
def staged(target: str, folder: Path) -> Iterator[Stage]:
    """Start the programs, and wait until a daemon knows their probes. folder: see `Stage`."""
    require(os.path.exists(SYSTEM_PYTHON), SYSTEM_PYTHON)
    require(shutil.which("g++"), "g++")
    java = Java(java_home())
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster())
        sessions = stack.enter_context(Session(cluster)), stack.enter_context(Session(cluster))
        sessions[0].do(*_TABLES)
        pgbench = [str(cluster.programs / "pgbench"), "-h", str(cluster.folder), "-U", "postgres", "postgres"]
        subprocess.run([*pgbench, "-i", "-q"], check=True, capture_output=True)
        stack.enter_context(IdleJvm(java))
        stack.enter_context(_idle_python())
        thrower = stack.enter_context(Thrower(compile_once(TARGETS / "throw.cpp", folder / "throw", ["g++", "-O2"])))
        shutil.copy(TARGETS / "Contend.java", folder)
        client = stack.enter_context(Client(target))
        for path in (cluster.path, java.libjvm, str(Path(SYSTEM_PYTHON).resolve())):
            wait_for(partial(client.list_probes, f":{path}::"), f"the probes of {path}")
        wait_for(partial(client.list_probes, "libstdcxx:*", pids=[thrower.pid]), "the probes of libstdc++")
        yield Stage(target, folder, Programs(cluster, sessions, java, thrower))


@contextmanager
def _idle_python() -> Iterator[None]:
    with subprocess.Popen([*_PYTHON, "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()
