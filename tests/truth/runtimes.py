"""Questions about CPython, the JVM and PostgreSQL, which tell by themselves what they did."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.kernel.test_inventory import installing
from tests.kernel.test_openjdk import java_home
from tests.kernel.test_postgresql import Cluster, Session
from tests.kernel.test_python import Script
from tests.support import SYSTEM_PYTHON
from tests.truth.answer import Answer
from tests.truth.asking import ask, ask_of_command
from tests.truth.loads import LOADS
from tests.truth.questions import Asked

_MAKES = 8
_SLEEPS_MS = (5, 20, 50)
_COLLECTING = (
    "import gc, os; kept = [[number] for number in range(20000)]; "
    "print(os.getpid(), sum(each['collections'] for each in gc.get_stats()), flush=True); os._exit(0)"
)


def python_calls(asked: Asked) -> Answer:
    """Calls as the interpreter's own profile function sees them, which 3.11 takes to fire its probe."""
    with Script("python_calls.py") as script:
        told = ask(
            asked.target,
            "trace",
            "python:function__entry(arg0:str, arg1:str, arg2)",
            sites=1,
            pids=[script.pid],
            work=lambda _: script.go(),
        )
    answer = Answer()
    calls = [values for kind, *values in told.truth if kind == "call"]
    found = [record["args"] for record in told.records]
    answer.compare("call", Counter(map(str, found)), Counter(map(str, calls)))
    answer.require("order", found == calls, True)
    return answer


class Postgres:
    """Statements of sessions against the server's own log, with one server for all runs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __call__(self, asked: Asked) -> Answer:
        with Session(self._cluster) as session:
            session.do("SET log_min_duration_statement = 0;")
            statements = [f"SELECT pg_sleep({each / 1000}), {number};" for number in range(5) for each in _SLEEPS_MS]
            before = len(self._log())
            told = ask(
                asked.target,
                "spans",
                "postgresql:query__start(arg0:str)",
                "postgresql:query__done(arg0:str)",
                sites=2,
                pids=[session.pid],
                work=lambda _: session.do(*statements),
            )
        logged = re.findall(r"duration: ([\d.]+) ms  statement: (SELECT pg_sleep.*)", self._log()[before:])
        answer = Answer("ms from the log")
        answer.compare("logged", Counter(text for _, text in logged), Counter(statements))
        answer.compare("statement", Counter(each["args"][0] for each in told.records), Counter(statements))
        answer.require("lost", told.summary["lost"], 0)
        for (logged_ms, text), record in zip(logged, told.records, strict=False):
            elapsed_ms = record["elapsed"] / 1e6
            # the log's time begins before the probe's, and ends before it: only the sleep bounds both
            slept = re.search(r"pg_sleep\(([\d.]+)\)", text)
            if slept is None or elapsed_ms < float(slept[1]) * 1e3:
                answer.problems.append(f"{text}: {elapsed_ms} ms")
            answer.difference = max(answer.difference, abs(elapsed_ms - float(logged_ms)))
        return answer

    def _log(self) -> str:
        return (self._cluster.folder / "log").read_text()


def first_jvm(folder: Path, load: str, engine: str) -> Answer:
    """The first run of a daemon's life: the launcher loads libjvm.so, which nobody knows before."""
    home = java_home()
    with installing(folder, [home], engine) as daemon, LOADS[load](daemon.target, folder):
        command = [str(home / "bin/java"), "-Xlog:class+load", "-version"]
        told = ask_of_command(daemon.target, "trace", "hotspot:class__loaded(class)", command=command)
    names = re.findall(r"\[class,load\] (\S+) source:", told.truth)
    answer = Answer()
    answer.compare(
        "class",
        Counter(each["args"][0] for each in told.records),
        Counter(name.replace(".", "/") for name in names),
    )
    answer.require("lost", told.summary["lost"], 0)
    answer.require("more than 100 classes", len(names) > 100, True)
    return answer


def first_make(folder: Path, load: str, engine: str) -> Answer:
    """Interpreters that make runs, none of which ran before."""
    programs = folder / "programs"
    programs.mkdir()
    python = shutil.copy(SYSTEM_PYTHON, programs / "python")
    makefile = folder / "Makefile"
    rules = [f'{number}:\n\t@{python} -S -I -c "{_COLLECTING}"\n' for number in range(_MAKES)]
    makefile.write_text(f"all: {' '.join(map(str, range(_MAKES)))}\n" + "".join(rules))
    with installing(folder, [programs], engine) as daemon, LOADS[load](daemon.target, folder):
        command = ["make", "-s", "-j", "4", "-f", str(makefile)]
        told = ask_of_command(daemon.target, "count", "python:gc__start", "--by", "pid", command=command)
    answer = Answer()
    truth = {int(pid): int(count) for pid, count in (line.split() for line in told.truth.splitlines())}
    answer.require("processes", len(truth), _MAKES)
    answer.compare("collections of", {each["key"][0]: each["count"] for each in told.records}, truth)
    answer.require("lost", told.summary["lost"], 0)
    return answer


FIRST: dict[str, Callable[[Path, str, str], Answer]] = {"first-jvm": first_jvm, "first-make": first_make}
"""Each needs a daemon of its own. Called with a folder, a load and an engine."""
