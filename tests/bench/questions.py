"""What a hit costs the traced program while the kernel answers a question of it, beside bpftrace's answer.

A question in D costs what the same question of `stapsdt count` does.
"""

from __future__ import annotations

import shutil
import subprocess
from statistics import median
from typing import NamedTuple

from stapsdtd.client import Aggregate, Client, SubscribeOptions
from tests.bench.report import Figure, median_ratio
from tests.bench.setup import SELECTOR, Firing, Setup
from tests.bench.tracers import bpftrace, running
from tests.support import Daemon, stapsdt_command

_KEYS = 1000
_ROUNDS = 200
"""The first argument counts from 0 to _KEYS in each."""
_D_GOAL = 1.0


class _Question(NamedTuple):
    """goal: of our cost, as a part of bpftrace's. has_texts: whether arg1 is a string."""

    name: str
    ours: Aggregate
    clause: str
    goal: float
    where: str = ""
    has_texts: bool = False


_QUESTIONS = (
    _Question("count()", Aggregate(), "{ @ = count(); }", 0.98),
    _Question("count() by arg0, 1,000 keys", Aggregate(by=["arg0"]), "{ @[arg0] = count(); }", 1.0),
    _Question("quantize(arg0)", Aggregate(functions=["quantize"], value="arg0"), "{ @ = hist(arg0); }", 1.0),
    _Question(
        "count() by str(arg1) of 63 bytes, 1,000 keys",
        Aggregate(by=["arg1:str"]),
        "{ @[str(arg1)] = count(); }",
        1.0,
        has_texts=True,
    ),
    _Question("a filter on arg0 that rejects", Aggregate(), "/arg0 == 123456/ { @ = count(); }", 1.0, "arg0 == 123456"),
)


def run(setup: Setup) -> list[Figure]:
    has_bpftrace = shutil.which("bpftrace") is not None
    ours: dict[str, list[float]] = {each.name: [] for each in _QUESTIONS}
    theirs: dict[str, list[float]] = {each.name: [] for each in _QUESTIONS}
    with (
        setup.daemon() as daemon,
        Firing(setup.folder) as numbers,
        Firing(setup.folder, _KEYS) as texts,
        Client(daemon.target) as client,
    ):
        for _ in range(setup.repeats):
            for question in _QUESTIONS:
                firing = texts if question.has_texts else numbers
                options = SubscribeOptions(pids=[firing.pid], where=question.where)
                with client.aggregate(SELECTOR.partition("(")[0], question.ours, options) as subscription:
                    ours[question.name].append(_seconds_a_hit(firing))
                    account = subscription.unsubscribe()
                    counted = account.filtered if question.where else account.aggregated
                    assert counted == _KEYS * _ROUNDS, account
                if has_bpftrace:
                    with bpftrace(firing, question.clause):
                        theirs[question.name].append(_seconds_a_hit(firing))
        in_d = _in_d(setup, daemon, texts)
    version = _version() if has_bpftrace else ""
    return [
        *(
            _figure(question, ours[question.name], median_ratio(ours[question.name], theirs[question.name]), version)
            for question in _QUESTIONS
        ),
        in_d,
    ]


def _in_d(setup: Setup, daemon: Daemon, firing: Firing) -> Figure:
    """Measure the commands in turn, as somebody types them."""
    pid = str(firing.pid)
    program = "firing$target:::hit { @[copyinstr(arg1)] = count(); }"
    commands = {
        "d": stapsdt_command(daemon.target, "d", "-p", pid, "-n", program),
        "count": stapsdt_command(daemon.target, "count", "firing:hit", "--by", "arg1:str", "--pid", pid),
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(setup.repeats):
        for name, command in commands.items():
            with running(firing, *command):
                seconds[name].append(_seconds_a_hit(firing))
    ratio = median_ratio(seconds["d"], seconds["count"])
    assert ratio is not None
    goal = f"<= {_D_GOAL} of stapsdt count's"
    return Figure("@[copyinstr(arg1)] = count() in D", median(seconds["d"]), "s", ratio, goal, ratio <= _D_GOAL)


def _figure(question: _Question, seconds: list[float], ratio: float | None, version: str) -> Figure:
    met = None if ratio is None else ratio <= question.goal
    return Figure(question.name, median(seconds), "s", ratio, f"<= {question.goal} of bpftrace's", met, version)


def _seconds_a_hit(firing: Firing) -> float:
    return sum(firing.fire(_KEYS).seconds_a_hit for _ in range(_ROUNDS)) / _ROUNDS


def _version() -> str:
    return subprocess.run(["bpftrace", "--version"], capture_output=True, text=True, check=True).stdout.strip()
